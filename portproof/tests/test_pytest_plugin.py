"""The plugin of pytest, in runs of pytest of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toy_sources import PORT, REF

import portproof.localize.diagnosis  # noqa: F401  with SciPy, which a process cannot import a second time
import portproof.pytest_plugin  # noqa: F401
from portproof.compare import PASS, Item, Row, Verdict

PLUGIN = "portproof.pytest_plugin"
TEST = """
import numpy as np
import port_net

INPUTS = [np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)]


def test_port(portproof_judge, activation="ReLU"):
    verdict = portproof_judge(port_net.Port(activation), reference="ref_net:Ref", inputs=lambda: INPUTS, modes=["eval"])
    assert verdict.counted > 10


def test_nothing():
    pass
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A test of a pair, whose two sides are modules."""
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makepyfile(ref_net=f"import torch\n{REF}", port_net=f"import paddle\n{PORT}", test_it=TEST)
    return pytester


def run(project, *flags: str):
    return project.runpytest("-p", PLUGIN, "-p", "no:xdist", "-p", "no:cacheprovider", *flags)


def without_reference(project) -> None:
    project.makepyfile(ref_net="raise AssertionError('the reference is imported')")


RECORDING = Path("recordings", "test_it.test_port.ref.safetensors")
FORMER = RECORDING.with_name("test_port.ref.safetensors")


def test_a_recording_is_written_on_demand_and_judged(project):
    missing = run(project)
    missing.assert_outcomes(passed=1, failed=1)
    missing.stdout.fnmatch_lines(
        [f"*{RECORDING} does not exist: run pytest --portproof-update 'test_it.py::test_port'*"]
    )
    assert "Traceback" not in missing.stdout.str() and not (project.path / RECORDING).exists()
    run(project, "--portproof-update").assert_outcomes(passed=2)
    without_reference(project)
    run(project, "-m", "portproof").assert_outcomes(passed=1, deselected=1)
    (project.path / RECORDING).rename(project.path / FORMER)
    renamed = run(project)
    renamed.assert_outcomes(passed=1, failed=1)
    fix = f"if this test's is {FORMER.name}, run mv {project.path / FORMER} {project.path / RECORDING}; else run pytest"
    renamed.stdout.fnmatch_lines([f"*{RECORDING} does not exist: {fix} --portproof-update 'test_it.py::test_port'*"])


def test_a_port_that_is_wrong_fails_in_one_line_with_the_report_beside(project):
    """Also where the reference has just been recorded."""
    project.makepyfile(test_it=TEST.replace('activation="ReLU"', 'activation="ReLU6"'))
    result = run(project, "--portproof-update", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1, failed=1)
    line = "FAIL judge: act (ReLU): forward: it is ReLU6, not ReLU; "
    result.stdout.fnmatch_lines([f"{line}*", "*- Captured portproof call -*", "located: act (ReLU)*", f"{line}*"])
    assert "Traceback" not in result.stdout.str()
    junit = (project.path / "junit.xml").read_text(encoding="utf-8")
    assert re.search(rf'<property name="portproof" value="{re.escape(line)}', junit)


def test_a_damaged_recording_is_one_line(project):
    (project.path / RECORDING).parent.mkdir()
    (project.path / RECORDING).write_bytes(b"no recording")
    result = run(project)
    result.assert_outcomes(passed=1, failed=1)
    assert f"{RECORDING} refused" in result.stdout.str() and "Traceback" not in result.stdout.str()


def test_a_reference_that_is_not_there_is_one_line(project):
    (project.path / "ref_net.py").unlink()
    result = run(project, "--portproof-update")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*reference 'ref_net:Ref': No module named 'ref_net'*"])
    assert not (project.path / RECORDING).exists()


def test_names_and_what_makes_a_reference(project):
    text = TEST.replace('reference="ref_net:Ref"', 'reference=__import__("ref_net").Ref, name="two / one"')
    project.makepyfile(test_it=text)
    run(project, "--portproof-update").assert_outcomes(passed=2)
    [name] = recordings(project)
    assert re.fullmatch(r"two-one-[0-9a-f]{8}\.ref\.safetensors", name)


NAMED = """
import pytest

class Test{name}:
    @pytest.mark.parametrize("word", ["a/b", "a b", "a" * 300])
    def test_port(self, portproof_judge, word):
        portproof_judge(None, None, None)
"""


class Written:
    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()


def test_each_test_has_a_recording_of_its_own(project, monkeypatch):
    """Of tests of one name in two files and classes, with parameters that differ in punctuation, or are long."""
    monkeypatch.setattr(f"{PLUGIN}._record", lambda *_: Written())
    monkeypatch.setattr("portproof.judge", lambda port, path: Verdict("it", [Row(Item(path.name), PASS)]))
    one, two = NAMED.format(name="One"), NAMED.format(name="Two")
    project.makepyfile(test_it=one + two, test_other=one)
    run(project, "--portproof-update").assert_outcomes(passed=9)
    names = [re.sub(r"-[0-9a-f]{8}\.ref\.safetensors$", "", name) for name in recordings(project)]
    assert len(names) == 9 and names.count("test_it.TestOne.test_port-a-b") == 2
    run(project).assert_outcomes(passed=9)


def recordings(project) -> list[str]:
    return sorted(path.name for path in (project.path / "recordings").iterdir())


def test_a_fixture_that_is_never_called_fails(project):
    text = """
    import pytest

    def test_neither(portproof_align, portproof_judge):
        pass

    def test_skipped(portproof_judge):
        pytest.skip()
    """
    project.makepyfile(test_it=text)
    result = run(project)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["the test asks for portproof_align and never calls it: nothing was judged"])


def test_a_pair_is_aligned(project):
    project.makepyfile(
        test_it="""
        import numpy as np
        import pytest
        import port_net
        import ref_net


        @pytest.mark.parametrize("activation", ["ReLU", "ReLU6"])
        def test_pair(portproof_align, activation):
            inputs = [np.ones((4, 5), np.float32)]
            portproof_align(ref_net.Ref(), port_net.Port(activation), inputs, modes=["eval"], drawn=True)
        """
    )
    result = run(project, "-m", "portproof")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*FAIL align: act (ReLU): forward: it is ReLU6, not ReLU; *"])


def test_the_wheel_announces_it():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points.pytest11]\n"{PLUGIN}" = "{PLUGIN}"\n' in project
