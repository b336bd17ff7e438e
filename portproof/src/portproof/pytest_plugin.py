"""A plugin of pytest: a port is judged in a test against a recording that lies beside it.

    def test_the_port(portproof_judge):
        portproof_judge(PortNet(), reference="my.net:Net", inputs=lambda: [images()])

The recording is `recordings/NAME.ref.safetensors` in the folder of the test. `pytest --portproof-update` records anew,
where the reference's framework is installed, and judges; without the flag nothing of the reference is imported. A test
that fails says the verdict's last line, and pytest shows the report under "Captured portproof call". `pytest -m
portproof` selects these tests; the last line is also the property "portproof" of a JUnit file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sturdyio.cli import UserError

if TYPE_CHECKING:
    from portproof.ladder.pairs.whole import AlignVerdict

FIXTURES = {"portproof_align", "portproof_judge"}


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "record the references of portproof_judge anew, then judge"
    parser.getgroup("portproof").addoption("--portproof-update", action="store_true", help=how)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "portproof: proves a port; set on each test that uses portproof's fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("portproof")


@pytest.fixture
def portproof_align(request: pytest.FixtureRequest, record_property: Callable) -> Callable[..., AlignVerdict]:
    """`portproof.align(ref, port, inputs, **options)`; the test fails unless the verdict is PASS."""
    import portproof

    def align(ref: Any, port: Any, inputs: Any, **options: Any) -> AlignVerdict:
        return _passed(request, record_property, lambda: portproof.align(ref, port, inputs, **options))

    return align


@pytest.fixture
def portproof_judge(request: pytest.FixtureRequest, record_property: Callable) -> Callable[..., AlignVerdict]:
    """Judge a port against the recording beside the test; the test fails unless the verdict is PASS.

    portproof_judge(port, reference=, inputs=, name="", weights="probe", **options)

    `reference`: "PKG.MOD:FACTORY", or what makes the model; `inputs`: those of `portproof.record`, or what makes them;
    both are used with --portproof-update only, as is `weights`. `name`: of the recording; default: the test's.
    `options`: those of `portproof.judge`.
    """
    import portproof

    def judge(
        port: Any, reference: Any, inputs: Any, *, name: str = "", weights: str = "probe", **options: Any
    ) -> AlignVerdict:
        file = re.sub(r"[^\w.-]+", "-", name or request.node.name).strip("-")
        path = request.path.parent / "recordings" / f"{file}.ref.safetensors"
        if request.config.getoption("--portproof-update"):
            _record(reference, inputs, weights).save(path)
        elif not path.is_file():
            command = f"pytest --portproof-update '{request.node.nodeid}'"
            pytest.fail(f"{path} does not exist: run {command} where the reference's framework is", pytrace=False)
        return _passed(request, record_property, lambda: portproof.judge(port, path, **options))

    return judge


def _record(reference: Any, inputs: Any, weights: str) -> Any:
    import portproof
    from portproof.ladder.pairs.named import model_factory

    try:
        factory = model_factory(reference, "reference") if isinstance(reference, str) else reference
        return portproof.record(factory(), inputs() if callable(inputs) else inputs, weights=weights, factory=factory)
    except UserError as error:
        pytest.fail(str(error), pytrace=False)


def _passed(request: pytest.FixtureRequest, record_property: Callable, prove: Callable[[], AlignVerdict]) -> Any:
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
