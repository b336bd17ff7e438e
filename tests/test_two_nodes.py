"""Two machines that share a folder: started at once, one of them killed, preempted in an evaluation, and resumed.

Each is a network of its own, under a name of its own, where `ip netns` can make them (as root), else they are two
launchers on one loopback address.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import paddle
import pytest
from test_nothing_lost import content, wait_for
from test_train import write_images
from test_train_shell import ended, trainers

from mobilenetv3_common.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SUFFIX = {"mobilenetv3_ref": ".pth", "mobilenetv3_paddle": ".pdparams"}
# Of 80 images, 2 on each of two processes: 20 batches, of which a kill after the first checkpoint leaves some also on a
# fast machine; and 12 in the evaluation of 48.
RECIPE = "--train-crop-size 32 --val-crop-size 32 --val-resize-size 32 --batch-size 2 --workers 0 --epochs 1"
RECIPE = [*RECIPE.split(), "--print-freq", "1", "--lr", "0.01", "--checkpoint-freq", "1", "--output-dir"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def networks() -> Iterator[tuple[list[list[str]], str]]:
    """(what starts a command on each of the two machines, the first's address)."""
    names = [f"node{rank}-{os.getpid()}" for rank in range(2)]
    addresses = [f"10.213.{os.getpid() % 250}.{rank + 1}" for rank in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "port0", "netns", names[0], "type", "veth", "peer", "name", "port1", "netns", names[1])
        for name, port, address in zip(names, ("port0", "port1"), addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", port)
            for device in (port, "lo"):
                ip("-n", name, "link", "set", device, "up")
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        yield [["ip", "netns", "exec", name, *named, name] for name in names], addresses[0]
    except (OSError, subprocess.CalledProcessError):  # not root, or a container that may not
        yield [[], []], "127.0.0.1"
    finally:
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(params=SUFFIX)
def package(request) -> str:
    """Each package in turn."""
    if request.param == "mobilenetv3_paddle" and paddle.device.cuda.device_count() == 1:
        pytest.skip("Paddle's launcher starts no more processes than there are cards, not even on the CPU")
    return request.param


class Nodes:
    """Both machines, each with a folder of its own to work in, and one that they share."""

    def __init__(self, folder: Path, networks: tuple[list[list[str]], str], package: str) -> None:
        self.starts, self.address = networks
        self.cwd = [folder / "node0", folder / "node1"]
        for cwd in self.cwd:
            cwd.mkdir()
        self.shared = folder / "shared"
        shutil.copytree(ROOT / "shell", self.shared / "shell")
        (self.shared / "shell" / "setup.sh").write_text(f"echo '{sys.executable}'\n")
        self.data = write_images(self.shared / "data", train=40, val=24, classes=("cat", "dog"))
        self.framework = {"mobilenetv3_ref": "torch"}.get(package, "paddle")

    def start(self, node: int, *flags: str | Path, **env: str) -> subprocess.Popen:
        """`train_dist.sh` on a machine of the two, or without MASTER where this test runs."""
        line = ["sh", self.shared / "shell" / "train_dist.sh", *RECIPE, *flags, "--data-path", self.data]
        known = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "DEVICES")}
        start = self.starts[node] if "MASTER" in env else []
        with (self.cwd[node] / "err").open("ab") as err:
            return subprocess.Popen(
                [*start, *map(str, line)],
                cwd=self.cwd[node],
                env=known | {"FRAMEWORK": self.framework, "PYTHONUNBUFFERED": "1"} | env,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )

    def start_both(self, *flags: str | Path) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("", 0))
            master = f"{self.address}:{free.getsockname()[1]}"
        env = {"NNODES": "2", "PROCESSES": "1", "MASTER": master}
        return [self.start(node, *flags, NODE_RANK=str(node), **env) for node in range(2)]

    def said(self, node: int) -> str:
        return (self.cwd[node] / "err").read_text()

    def kill(self, node: int) -> None:
        """As when the machine's power goes."""
        while alive := trainers(self.cwd[node]):
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path, networks, package) -> Iterator[Nodes]:
    """Two machines; nothing of them is left when the test ends."""
    nodes = Nodes(tmp_path, networks, package)
    yield nodes
    for node in range(2):
        nodes.kill(node)


def finished(processes: list[subprocess.Popen], seconds: float = 60) -> list[int]:
    """The exit statuses."""
    end = time.monotonic() + seconds
    for process in processes:
        process.communicate(timeout=max(1, end - time.monotonic()))
    return [process.returncode for process in processes]


def after_line(process: subprocess.Popen, words: str, then: Callable[[], None]) -> None:
    """Do something once a line with these words has come."""
    assert any(words in line for line in process.stdout), words
    then()


@pytest.mark.thorough("test_machines_find_each_other, test_a_resumed_run_ends_like_an_unbroken_one")
@pytest.mark.timeout(240)
def test_two_machines_lose_nothing(nodes, package, tmp_path):
    """The weights in the end are those of two processes of one machine that nothing happened to, to the last bit."""
    out = nodes.shared / "out"
    checkpoint = out / f"checkpoint{SUFFIX[package]}"

    processes = nodes.start_both(out)
    wait_for(checkpoint, processes[0])
    nodes.kill(1)
    assert finished(processes[:1])[0] not in (0, 2)
    processes[1].communicate()
    assert ended(nodes.cwd[0])
    assert len({path.name.rpartition("-")[0] for path in (out / "log").iterdir()}) == len({*map(tuple, nodes.starts)})

    # SIGTERM to one of them, during an evaluation that takes longer
    long = ("--val-crop-size", "640", "--val-resize-size", "640")  # some seconds, even on an idle machine
    processes = nodes.start_both(out, "--resume", checkpoint, *long)
    after_line(processes[0], "[Epoch 0, iter: 19]", lambda: (time.sleep(0.5), processes[1].terminate()))
    assert finished(processes) == [143, 143], nodes.said(0) + nodes.said(1)
    assert "stopped by SIGTERM before the evaluation of epoch 0" in nodes.said(0)
    assert not list(out.glob("model_*")) and not (out / "run.lock").exists()

    processes = nodes.start_both(out, "--resume", checkpoint)
    assert finished(processes) == [0, 0], nodes.said(0) + nodes.said(1)
    unbroken = [nodes.start(0, tmp_path / "unbroken")]
    assert finished(unbroken) == [0], nodes.said(0)
    assert content(out, package) == content(tmp_path / "unbroken", package)
    assert len(read_metrics(out / "metrics.jsonl")) == 20
    assert "Traceback" not in nodes.said(0) + nodes.said(1)
    assert not re.findall(r"run\.lock is of", nodes.said(0))
