"""Rungs that run two at a time: their results and what they print, in order, whatever one of them does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from forked_python import is_running

from portproof.compare import FAIL, PASS, Item, Row, Verdict
from portproof.ladder import all_rungs
from portproof.ladder.all_rungs import Planned, run_all, side_by_side
from portproof.ladder.rung import Rung
from portproof.report.summary import RungResult
from sturdyio.cli import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def result_of(number: int) -> RungResult:
    rung = Rung(f"0{number}_test")
    rung.check(Verdict(f"verdict {number}", [Row(Item(f"item {number}"), PASS)]), group=lambda item: item.name * 2)
    return RungResult(rung.name, "model", 1.0, rung)


def test_results_come_in_order_with_what_their_rungs_print(capsys, tmp_path):
    def wait_for(name: str) -> None:
        end = time.monotonic() + 60
        while not (tmp_path / name).is_file():
            assert time.monotonic() < end, f"{name} never came"
            time.sleep(0.01)

    def run(number: int) -> RungResult:
        (tmp_path / f"{number} begun").touch()
        if number == 2:
            wait_for("0 begun")  # beside it, or never
        if number == 0:
            wait_for("2 done")
        print(f"rung {number} in {os.getpid()}")
        (tmp_path / f"{number} done").touch()
        return result_of(number)

    results = list(side_by_side([partial(run, number) for number in range(3)], [2, 0, 1]))
    assert [result.rung.verdicts[0].title for result in results] == ["verdict 0", "verdict 1", "verdict 2"]
    assert results[1].rung.groups[0](Item("item 1")) == "item 1item 1" and results[1].rung.log
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rung")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    processes = {line.split()[3] for line in lines}
    assert len(processes) == 2 and str(os.getpid()) not in processes


def test_what_a_rung_raises_ends_the_run_and_one_that_dies_does_not(monkeypatch, tmp_path, capsys):
    def mistaken() -> RungResult:
        raise UserError("no such folder")

    with pytest.raises(UserError, match="no such folder"):
        list(side_by_side([mistaken, mistaken], [0, 1]))

    def run(planned: Planned, _refused: bool) -> RungResult:
        return result_of(1) if planned.script.stem == "alive" else os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(all_rungs, "run_planned", run)
    monkeypatch.setattr("portproof.report.page.write_page", lambda *_: None)
    rungs = [Planned(Path(f"{name}.py"), []) for name in ("alive", "dead", "alive")]
    assert run_all(rungs, tmp_path, {}, in_lanes=True) == FAIL
    printed = capsys.readouterr().out
    assert "FAIL dead: its process was killed" in printed and printed.count("PASS     01_test") == 2


def test_a_port_that_cannot_be_imported_is_one_line(tmp_path, capsys):
    script = tmp_path / "01_test.py"
    script.write_text(
        "from portproof.io.cli import PortError\n"
        "def main(args): raise PortError('importing net raised ValueError: no')\n"
        "def get_args_parser():\n"
        "    import argparse\n"
        "    return argparse.ArgumentParser()\n",
        encoding="utf-8",
    )
    result = all_rungs.run_planned(Planned(script, []))
    out, err = capsys.readouterr()
    assert out == "FAIL 01_test: importing net raised ValueError: no\n" and not err
    assert result.rung is None and result.error == "importing net raised ValueError: no"


@pytest.mark.parametrize(
    ("sent", "said", "status"),
    [(signal.SIGINT, "all: interrupted\n", 130), (signal.SIGTERM, "", -15), (signal.SIGKILL, "", -9)],
)
def test_however_it_ends_every_process_ends(sent, said, status, tmp_path):
    code = """if True:
        import os, signal, subprocess, sys, time
        from functools import partial
        from pathlib import Path
        from sturdyio.cli import run
        from portproof.ladder.all_rungs import side_by_side

        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it

        def rung(number):
            child = subprocess.Popen(["sleep", "60"])
            try:
                Path(sys.argv[1], f"{number}.pids").write_text(f"{os.getpid()} {child.pid}")
                child.wait()
            finally:
                child.kill()
                child.wait()  # where nothing else collects it, it would be there as a zombie

        run(lambda: list(side_by_side([partial(rung, 0), partial(rung, 1)], [0, 1])) and 0, "all")
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "0.pids", tmp_path / "1.pids"]
    while not all(path.is_file() and path.read_text() for path in files):
        time.sleep(0.05)
    process.send_signal(sent)
    assert process.communicate(timeout=20)[1] == said and process.returncode == status
    end = time.monotonic() + 20
    for pid in " ".join(path.read_text() for path in files).split():
        while is_running(pid):
            assert time.monotonic() < end, f"{pid} still runs"
            time.sleep(0.05)
