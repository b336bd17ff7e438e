"""With how many threads commands compute: one, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest
import torch

from portproof import __main__ as command_line
from portproof.io.process import use_threads
from portproof.ladder import Rung, run_rung, rung, rung_parser

FLAGS = pytest.mark.parametrize("flags, count", [([], None), (["--threads", "3"], 3)])


@pytest.fixture
def asked(monkeypatch):
    """What PyTorch was told, in a process whose user has set no number."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is as before when the test ends
    monkeypatch.delenv("OMP_NUM_THREADS")
    return told


@FLAGS
def test_a_step_is_run_with_as_many_threads_as_asked_for(flags, count, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "argv", ["step", "--output-dir", str(tmp_path), *flags])
    monkeypatch.setattr(rung, "use_threads", lambda count: print(f"{count} threads"))  # in the process that judges
    with pytest.raises(SystemExit):
        run_rung("step", lambda args: Rung("step"), rung_parser("step", ""))
    assert f"{count} threads" in capfd.readouterr().out


@FLAGS
def test_so_is_a_command(flags, count, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["portproof", "record", "--ref", "no:Net", "--output", "x.safetensors", *flags])
    monkeypatch.setattr(command_line, "use_threads", lambda count: print(f"{count} threads"))
    with pytest.raises(SystemExit):
        command_line.main()
    assert f"{count} threads" in capfd.readouterr().out


@pytest.mark.parametrize("count", [None, 3])
def test_it_is_one_thread_unless_more_are_asked_for(count, asked):
    use_threads(count)
    assert (os.environ["OMP_NUM_THREADS"], asked) == (str(count or 1), [count or 1])


@pytest.mark.parametrize("own", ["2", "4,2"])
def test_a_number_that_the_user_has_set_stays(own, asked, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", own)
    use_threads(None)
    assert os.environ["OMP_NUM_THREADS"] == own
    assert asked == ([2] if own == "2" else [])


def test_the_frameworks_obey_what_is_said_before_their_import():
    code = (
        "from portproof.io.process import use_threads; use_threads(None); import torch; print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1"]
