"""With how many threads commands compute: one, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest
import torch

from portproof import __main__ as command_line
from portproof.io.process import use_threads
from portproof.ladder import Rung, run_rung, rung_parser


@pytest.fixture
def asked(monkeypatch):
    """What PyTorch was told, in a process whose user has set no number."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is as before when the test ends
    monkeypatch.delenv("OMP_NUM_THREADS")
    return told


@pytest.mark.parametrize("flags, number", [([], 1), (["--threads", "3"], 3)])
def test_a_step_computes_with_one_thread_or_as_asked(flags, number, asked, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["step", "--output-dir", str(tmp_path), *flags])
    seen = []

    def main(args):
        seen.append(os.environ["OMP_NUM_THREADS"])
        return Rung("step")

    with pytest.raises(SystemExit):
        run_rung("step", main, rung_parser("step", ""))
    assert (seen, asked) == ([str(number)], [number])


@pytest.mark.parametrize("flags, number", [([], 1), (["--threads", "3"], 3)])
def test_so_does_a_command(flags, number, asked, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["portproof", "record", "--ref", "no:Net", "--output", "x.safetensors", *flags])
    with pytest.raises(SystemExit):
        command_line.main()
    assert asked == [number]


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
