"""A plugin of pytest: a port is judged in a test against a recording that lies beside it.

    def test_the_port(portproof_judge):
        portproof_judge(PortNet(), reference="my.net:Net", inputs=lambda: [images()])

The recording is `recordings/FILE.CLASS.TEST.ref.safetensors` in the folder of the test, by the names of its file, its
classes, and itself with its parameters; where characters are replaced, a digest follows. `pytest --portproof-update`
records anew, where the reference's framework is installed, and judges; without the flag nothing of the reference is
imported. A test that fails says the verdict's last line, and pytest shows the report under "Captured portproof call".
One that asks for a fixture and never calls it fails. `pytest -m portproof` selects these tests; the last line is also
the property "portproof" of a JUnit file.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sturdyio.cli import UserError

if TYPE_CHECKING:
    from portproof.ladder.pairs.whole import AlignVerdict

FIXTURES = {"portproof_align", "portproof_judge"}
UNCALLED = pytest.StashKey[set[str]]()  # fixtures that a test has asked for
MOST_NAME = 70  # characters of a recording's name; file systems take 255 bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "record the references of portproof_judge anew, then judge"
    parser.getgroup("portproof").addoption("--portproof-update", action="store_true", help=how)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "portproof: proves a port; set on each test that uses portproof's fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("portproof")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    for name in sorted(item.stash.get(UNCALLED, ())):
        pytest.fail(f"the test asks for {name} and never calls it: nothing was judged", pytrace=False)


@pytest.fixture
def portproof_align(request: pytest.FixtureRequest, record_property: Callable) -> Callable[..., AlignVerdict]:
    """`portproof.align(ref, port, inputs, **options)`; the test fails unless the verdict is PASS."""
    import portproof

    _uncalled(request).add("portproof_align")

    def align(ref: Any, port: Any, inputs: Any, **options: Any) -> AlignVerdict:
        return _passed(request, record_property, lambda: portproof.align(ref, port, inputs, **options))

    return align


@pytest.fixture
def portproof_judge(request: pytest.FixtureRequest, record_property: Callable) -> Callable[..., AlignVerdict]:
    """Judge a port against the recording beside the test; the test fails unless the verdict is PASS.

    portproof_judge(port, reference=, inputs=, name="", weights="probe", **options)

    `reference`: "PKG.MOD:FACTORY", or what makes the model; `inputs`: those of `portproof.record`, or what makes them;
    both are used with --portproof-update only, as is `weights`. `name`: of the recording, which tests may share;
    default: the test's. `options`: those of `portproof.judge`.
    """
    import portproof

    _uncalled(request).add("portproof_judge")

    def judge(
        port: Any, reference: Any, inputs: Any, *, name: str = "", weights: str = "probe", **options: Any
    ) -> AlignVerdict:
        path = _recording(request, _unique(name or _full_name(request)))
        if request.config.getoption("--portproof-update"):
            _record(reference, inputs, weights).save(path)
        elif not path.is_file():
            fix = f"run pytest --portproof-update '{request.node.nodeid}' where the reference's framework is"
            former = _recording(request, _replaced(name or request.node.name))
            if former.is_file():
                fix = f"if this test's is {former.name}, run {shlex.join(['mv', str(former), str(path)])}; else {fix}"
            pytest.fail(f"{path} does not exist: {fix}", pytrace=False)
        return _passed(request, record_property, lambda: portproof.judge(port, path, **options))

    return judge


def _uncalled(request: pytest.FixtureRequest) -> set[str]:
    return request.node.stash.setdefault(UNCALLED, set())


def _recording(request: pytest.FixtureRequest, name: str) -> Path:
    return request.path.parent / "recordings" / f"{name}.ref.safetensors"


def _full_name(request: pytest.FixtureRequest) -> str:
    """Of the test's file, its classes, and the test with its parameters."""
    classes = [node.name for node in request.node.listchain() if isinstance(node, pytest.Class)]
    return ".".join([request.path.stem, *classes, request.node.name])


def _replaced(name: str) -> str:
    """The name without what a file's name should not have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


def _unique(name: str) -> str:
    """A file's name, with a digest of `name` unless it is the same."""
    file = _replaced(name)[:MOST_NAME]
    return file if file == name else f"{file}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _record(reference: Any, inputs: Any, weights: str) -> Any:
    import portproof
    from portproof.ladder.pairs.named import model_factory

    try:
        factory = model_factory(reference, "reference") if isinstance(reference, str) else reference
        return portproof.record(factory(), inputs() if callable(inputs) else inputs, weights=weights, factory=factory)
    except UserError as error:
        pytest.fail(str(error), pytrace=False)


def _passed(request: pytest.FixtureRequest, record_property: Callable, prove: Callable[[], AlignVerdict]) -> Any:
    _uncalled(request).discard(request.fixturename)
    try:
        verdict = prove()
    except UserError as error:
        pytest.fail(str(error), pytrace=False)
    report = str(verdict)
    last = report.splitlines()[-1]
    record_property("portproof", last)
    if verdict.status or not verdict.counted:
        request.node.add_report_section("call", "portproof", report)
        pytest.fail(last, pytrace=False)
    return verdict
