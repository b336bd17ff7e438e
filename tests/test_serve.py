"""tools/serve.py: a real service, real clients under load, uploads that are refused, a real browser, and its end."""

import asyncio
import contextlib
import importlib.util
import io
import itertools
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from exported_models import need
from tiny_export import write_tiny_export

need("serve", "ray", "fastapi", "python_multipart", "httpx", "onnx", "onnxruntime")

import httpx  # noqa: E402 - and below: not before it is known that they are there
from browser import DESKTOP, PHONE, fits_sideways  # noqa: E402
from PIL import Image  # noqa: E402

from mobilenetv3_common.images import read_image  # noqa: E402
from mobilenetv3_common.predictions import top_classes  # noqa: E402
from mobilenetv3_deploy.predict import Predictor  # noqa: E402
from sturdyio.cli import UserError  # noqa: E402

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("serve", ROOT / "tools" / "serve.py")
serve = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(serve)
IMAGES = sorted((ROOT / "lite_data" / "val").rglob("*.JPEG"))
CLIENTS = 32
MEGABYTES, MEGAPIXELS, UPLOAD_SECONDS = 0.5, 4, 2  # limits of the service
LATE = 60  # seconds that a busy machine may take to answer at all


class Service:
    """tools/serve.py in a process of its own, with a small queue, and what it should answer."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.home, self.temporary = folder / "home", temporary  # its home folder, and where its files go meanwhile
        self.home.mkdir()
        self.port, metrics_port = free_ports(2)
        self.url, self.metrics = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{metrics_port}/metrics"
        models = {"port": write_tiny_export(folder / "port", 0), "reference": write_tiny_export(folder / "ref", 1)}
        self.answers = {path: answer(models, path) for path in IMAGES}
        flags = ["--model", models["port"], "--reference", models["reference"], "--port", self.port]
        flags += ["--metrics-port", metrics_port, "--max-batch", 4, "--max-queue", 8, "--max-megabytes", MEGABYTES]
        flags += ["--max-megapixels", MEGAPIXELS, "--upload-seconds", UPLOAD_SECONDS]
        command = [sys.executable, ROOT / "tools" / "serve.py", *flags]
        env = os.environ | {"HOME": str(self.home), "TMPDIR": str(temporary)}
        self.process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=env)
        first = self.process.stdout.readline()
        assert first == f"serving {self.url}/, metrics {self.metrics}\n"

    def post(self, content, content_type: str = "image/jpeg") -> httpx.Response:
        headers = {"Content-Type": content_type}
        return httpx.post(f"{self.url}/predict", content=content, headers=headers, timeout=LATE)

    def check(self, found: dict, path: Path) -> None:
        """`found` is the answer that `path` should have."""
        expected = self.answers[path]
        assert found.keys() == expected.keys()
        for role, rows in expected.items():
            assert [(row["class_id"], row["name"]) for row in found[role]] == [(r.class_id, r.name) for r in rows]
            # Other sizes of batches may be added up in another order: float32 sums of three terms, and a softmax.
            probabilities = [row.probability for row in rows]
            assert [row["probability"] for row in found[role]] == pytest.approx(probabilities, rel=1e-5)


def answer(models: dict[str, Path], path: Path) -> dict[str, list]:
    predictors = {role: Predictor(folder) for role, folder in models.items()}
    image = read_image(path)
    return {role: top_classes(one([image])[0], 5, one.class_names) for role, one in predictors.items()}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # the paths of Ray's sockets have to be short
        service = Service(tmp_path_factory.mktemp("service"), Path(temporary))
        yield service
        if service.process.poll() is None:
            service.process.terminate()
            service.process.wait(LATE)


@pytest.fixture
def still_answers(service) -> Iterator[None]:
    """After the test the service answers as before."""
    yield
    response = service.post(IMAGES[0].read_bytes())
    assert response.status_code == 200
    service.check(response.json(), IMAGES[0])


# --- answers


def test_the_body_and_the_file_of_a_form_are_answered_alike(service):
    data = IMAGES[1].read_bytes()
    forms = [("cat.jpg", "image/jpeg"), ("cat", "application/octet-stream")]
    responses = [service.post(data), service.post(data, "application/octet-stream")]
    for name, kind in forms:
        responses.append(httpx.post(f"{service.url}/predict", files={"file": (name, data, kind)}, timeout=LATE))
    for response in responses:
        assert response.status_code == 200
        service.check(response.json(), IMAGES[1])


def test_health_and_metrics(service):
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    end = time.monotonic() + 30  # Ray's processes report every few seconds
    pattern = r'ray_serve_num_http_requests_total\{.*method="POST".*route="/predict".*\} [1-9]'
    while not re.search(pattern, httpx.get(service.metrics).text):
        assert time.monotonic() < end
        time.sleep(0.5)


def test_the_service_listens_on_this_machine_alone(service):
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    addresses = [line.split()[3] for line in listening.splitlines()]
    assert f"127.0.0.1:{service.port}" in addresses
    assert not [one for one in addresses if one.endswith(f":{service.port}") and not one.startswith("127.0.0.1")]


def test_what_ray_keeps_is_the_users_alone(service):
    """Others can open nothing of it: not the token either, which in the home folder anyone could read."""
    folders = list(service.temporary.glob("ray*"))
    assert folders and not [folder for folder in folders if folder.stat().st_mode & 0o077]
    assert not (service.home / ".ray").exists()


async def keep_asking(service: Service, client: httpx.AsyncClient, paths, seen: Counter) -> None:
    """Post `paths` until they end or the service is being stopped; a full queue is asked again."""
    for path in paths:
        status = 429
        while status == 429:
            headers = {"Content-Type": "image/jpeg"}
            try:
                response = await client.post("/predict", content=path.read_bytes(), headers=headers, timeout=LATE)
            except httpx.ConnectError:  # refused: nothing of it was accepted
                seen["refused"] += 1
                return
            status = response.status_code
            seen[status] += 1
            if status == 429:
                assert response.headers["Retry-After"] == "1"
                await asyncio.sleep(0.05)
        if status == 503:
            return
        assert status == 200, response.text
        service.check(response.json(), path)


async def load(service: Service, paths, seen: Counter) -> None:
    """CLIENTS clients at a time, each with a connection of its own."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=service.url, limits=limits) as client:
        await asyncio.gather(*(keep_asking(service, client, paths, seen) for _ in range(CLIENTS)))


def in_a_loop(coroutine: Coroutine) -> Any:
    """What it returns; in a thread, for in this one the browser's loop runs."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


def test_under_load_each_is_answered_or_told_to_come_again(service):
    """More clients than the two batches and the queue hold."""
    seen = Counter()
    in_a_loop(load(service, IMAGES[:10], seen))
    assert seen.keys() == {200, 429} and seen[200] == 10 * CLIENTS


# --- what is refused


def bomb(width: int, height: int) -> bytes:
    """A PNG of some kilobytes that decodes to so many black pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    pixels = zlib.compress(bytes(width + 1) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def progressive(scans: int, side: int = 1900) -> bytes:
    """A JPEG of some kilobytes in so many scans: libjpeg's 10, and the last of these again and again."""
    made = io.BytesIO()
    Image.new("RGB", (side, side)).save(made, "JPEG", progressive=True)
    whole = made.getvalue()
    return whole[:-2] + whole[whole.rindex(b"\xff\xda") : -2] * (scans - 10) + whole[-2:]


def sixteen_bits() -> bytes:
    """A grey PNG, which 8 bits would make white."""
    made = io.BytesIO()
    Image.new("I;16", (300, 300), 1000).save(made, "PNG")
    return made.getvalue()


JPEG = IMAGES[0].read_bytes()
EMPTY_SEGMENT = b"\xff\xfe\0\2"
FORM = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="file"%s\r\nContent-Type: %s\r\n\r\n%s\r\n--b--\r\n'
REFUSED = {
    "cut off": (422, JPEG[: len(JPEG) // 2], "image/jpeg"),
    "no image": (422, b"no image at all", "image/jpeg"),
    "empty": (422, b"", "image/jpeg"),
    "bomb": (422, bomb(3000, 3000), "image/png"),
    "many scans": (422, progressive(64), "image/jpeg"),
    "many segments": (422, JPEG[:2] + EMPTY_SEGMENT * 50_000 + JPEG[2:], "image/jpeg"),
    "16 bits": (422, sixteen_bits(), "image/png"),
    "text": (415, JPEG, "text/plain"),
    "drawing": (415, b"<svg/>", "image/svg+xml"),
    "form of fields": (422, PART % (b"", b"text/plain", JPEG[:100]), FORM),
    "form with text": (415, PART % (b'; filename="a.txt"', b"text/plain", b"text"), FORM),
    "form without boundary": (400, JPEG, "multipart/form-data"),
    "damaged form": (400, JPEG, FORM),
    "two files": (
        400,
        PART[:-7] % (b'; filename="a"', b"image/png", b"x") + PART % (b'; filename="b"', b"", b"x"),
        FORM,
    ),
    "large": (413, bytes(int(MEGABYTES * 1e6) + 1), "image/jpeg"),
    "large form": (413, PART % (b'; filename="a.jpg"', b"image/jpeg", bytes(int(MEGABYTES * 1e6))), FORM),
}


@pytest.mark.parametrize("status, content, content_type", REFUSED.values(), ids=REFUSED)
def test_what_is_no_fit_image_is_refused(service, still_answers, status, content, content_type):
    response = service.post(content, content_type)
    assert (response.status_code, response.json().keys()) == (status, {"detail"})


def test_a_refusal_reaches_a_client_that_sends_all_first(service, still_answers):
    """More than fits into the buffers between the two: a connection that is closed before would be an error."""
    length = 20_000_000
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/jpeg\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=LATE) as one, one.makefile("rb") as answer:
        one.sendall(head.encode() + bytes(length))
        assert answer.readline() == b"HTTP/1.1 413 Request Entity Too Large\r\n"


def test_the_work_that_waits_is_bounded(service, still_answers):
    """Fewer images than may wait, each of which takes nearly all the work that may."""
    with ThreadPoolExecutor(10) as threads:
        large = [threads.submit(service.post, progressive(10)) for _ in range(10)]
        seen = Counter(one.result().status_code for one in large)
    assert seen.keys() == {200, 429}


def test_an_upload_that_never_ends_is_cut(service, still_answers):
    """No Content-Length says how much is coming."""
    sent = itertools.count()
    chunks = (bytes(50_000) for _ in iter(lambda: next(sent) < 200, False))
    assert service.post(chunks).status_code == 413


def test_a_slow_upload_is_cut(service, still_answers):
    """More than the service has in work and in its queue: none of them takes a place there."""
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/jpeg\r\nContent-Length: 1000\r\n\r\n"
    slow = [socket.create_connection(("127.0.0.1", service.port), timeout=LATE) for _ in range(CLIENTS)]
    for one in slow:
        one.sendall(head + b"x")
    assert service.post(JPEG).status_code == 200
    for one in slow:
        with one, one.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 408 Request Timeout\r\n"


@pytest.mark.parametrize("sent", [len(JPEG), len(JPEG) // 2], ids=["before the answer", "in the upload"])
def test_clients_that_go_away_do_no_harm(service, still_answers, sent):
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/jpeg\r\nContent-Length: {len(JPEG)}\r\n\r\n"
    for _ in range(CLIENTS):
        with socket.create_connection(("127.0.0.1", service.port), timeout=LATE) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            one.sendall(head.encode() + JPEG[:sent])


# --- the page


@pytest.mark.parametrize("locale, other, asks", [("en-GB", "zh", "Drop a picture"), ("zh-CN", "en", "把图片拖到这里")])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_shows_both_models_answers(browser, service, locale, other, asks, size):
    problems, requests = [], []
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, locale=locale)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{service.url}/", wait_until="load")
    assert asks in page.inner_text("#drop")
    script = """(bytes) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "a.jpg", { type: "image/jpeg" }));
        return data;
    }"""
    data = page.evaluate_handle(script, list(JPEG))
    page.dispatch_event("#drop", "drop", {"dataTransfer": data})
    page.wait_for_selector("#reference", timeout=LATE * 1000)
    for role, rows in service.answers[IMAGES[0]].items():
        lines = [row.split("\t") for row in page.inner_text(f"#{role} table").splitlines()]
        assert lines == [[row.name, f"{row.probability:.4f}"] for row in rows]
    assert page.evaluate("document.querySelector('#picture').naturalWidth") == read_image(IMAGES[0]).width
    assert fits_sideways(page)
    page.set_input_files("#drop input", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": JPEG[:2000]})
    refused = {"en-GB": "cannot be read", "zh-CN": "无法读取"}[locale]
    page.locator("#message").filter(has_text=refused).wait_for(timeout=LATE * 1000)
    assert [text for text in problems if "422" not in text] == []
    page.click(f"a[hreflang={other}]")
    page.wait_for_load_state()
    assert page.evaluate("document.documentElement.lang") == other
    assert asks not in page.inner_text("#drop")
    own = (f"{service.url}/", "data:", f"blob:{service.url}/")
    assert [url for url in requests if not url.startswith(own)] == []
    page.close()


# --- Ray's own configuration


@pytest.mark.thorough("test_the_body_and_the_file_of_a_form_are_answered_alike, by what tools/serve.py starts")
def test_the_configuration_of_the_page_serves(tmp_path):
    page = (ROOT / "docs" / "en" / "deploy.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    model, (port,) = write_tiny_export(tmp_path / "port", 0), free_ports(1)
    assert "/models/exported" in text and "8000" in text
    text = text.replace("/models/exported", str(model)).replace("8000", str(port))
    (tmp_path / "service.yaml").write_text(text, encoding="utf-8")
    command = [Path(sys.executable).parent / "serve", "run", tmp_path / "service.yaml"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | serve.RAY)
    try:
        end, response = time.monotonic() + LATE, None
        while response is None or response.status_code != 200:  # 404, 503: not ready
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.5)
            with contextlib.suppress(httpx.ConnectError):
                response = httpx.post(f"http://127.0.0.1:{port}/predict", content=JPEG, timeout=LATE)
        assert [row["class_id"] for row in response.json()["port"]] == [
            row.class_id for row in answer({"port": model}, IMAGES[0])["port"]
        ]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LATE)


# --- mistakes and the end


MISTAKES = {
    "missing folder": (["--model", "nowhere"], "nowhere does not exist"),
    "engine": (["--model", "port", "--engine", "abacus"], "engine 'abacus' is unknown"),
    "another preprocessing": (["--model", "port", "--reference", "other"], "has another preprocessing"),
    "host": (["--model", "port", "--host", "nowhere.invalid"], "nowhere.invalid, port 8000 cannot be listened on"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With two exported models, port and other, of which other has another crop."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_export(folder / "port", 0)
    write_tiny_export(folder / "other", 0, crop=192)
    return folder


def mistake(folder: Path, monkeypatch, *flags: str) -> str:
    """What the command says instead of starting the service."""
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as refused:
        serve.main(serve.get_args_parser().parse_args(flags))
    return str(refused.value)


@pytest.mark.parametrize("flags, reason", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(folder, monkeypatch, flags, reason):
    assert reason in mistake(folder, monkeypatch, *flags)


def test_a_port_that_is_taken_is_named(service, folder, monkeypatch):
    for name in ("--port", "--metrics-port"):
        said = mistake(folder, monkeypatch, "--model", "port", name, str(service.port))
        assert f"{name}: 127.0.0.1, port {service.port} cannot be listened on (Address already in use)" in said


def test_a_missing_package_is_named_with_its_remedy(tmp_path):
    code = "import runpy, sys; sys.modules['ray'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, ROOT / "tools" / "serve.py", "--model", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "pip install -e '.[serve]'" in result.stderr


def test_sigterm_under_load_loses_nothing_that_was_accepted(service):
    """Each client asks until it is told that the service is being stopped; no connection breaks before that."""

    async def run() -> Counter:
        seen = Counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/jpeg\r\nContent-Length: {len(JPEG)}\r\n\r\n"
        writer.write(head.encode() + JPEG[:1000])
        asking = asyncio.create_task(load(service, itertools.cycle(IMAGES), seen))
        await asyncio.sleep(UPLOAD_SECONDS / 4)
        service.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(UPLOAD_SECONDS / 4)
        writer.write(JPEG[1000:])  # its first half was accepted before the signal
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await asking
        return seen

    seen = in_a_loop(run())
    assert seen[200] and seen[503] and seen[503] + seen["refused"] == CLIENTS, seen
    assert seen.keys() <= {200, 429, 503, "refused"}
    assert service.process.wait(LATE) == 0
    assert list(service.temporary.glob("ray*")) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/health")
