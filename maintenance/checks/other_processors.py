"""Run the ladder's lower rungs, or a command, as on other processors: other vector instructions, other threads.

  python maintenance/checks/other_processors.py                              rungs 01 to 05 under every setting, 4 min
  python maintenance/checks/other_processors.py --setting sse -- COMMAND     COMMAND under one, its exit status

A setting is environment variables by which the libraries let one choose: which instructions PyTorch (ATEN), oneDNN,
MKL and NumPy's OpenBLAS use, and how many threads. All of them change the order in which sums are added up, and so how
they are rounded. For each setting a line says how the rungs ended and, for each side, which share of the values of the
forward passes has other bits than on this processor as it is; then which item of each rung came nearest its limit.
Exit status: that of COMMAND; else 0 every rung passed, 1 one did not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tqdm import tqdm

from maintenance import ROOT
from mobilenetv3_common.arguments import MODEL_NAMES
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run
from sturdyio.files import load_npy

PROG = "other_processors"
RUN_ALL = ROOT / "steps" / "run_all.py"
RUNGS = ("01_test_forward", "02_test_data", "03_test_metric", "04_test_loss", "05_test_backward")
# The first differs most from a processor of today: vectors of 16 bytes at most, no fused multiplication and addition.
SETTINGS = {
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Prescott",
        "OMP_NUM_THREADS": "1",
    },
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "AVX",
        "MKL_CBWR": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "OMP_NUM_THREADS": "2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "MKL_DEBUG_CPU_TYPE": "5",  # AVX2: on AMD's processors Paddle's MKL takes SSE, and for MKL_CBWR Bulldozer's
        "OPENBLAS_CORETYPE": "Zen",
        "OMP_NUM_THREADS": "2",
    },
    # As it is, but for the threads; MKL would take no more of them than there are cores.
    "threads": {"MKL_DYNAMIC": "FALSE", "OMP_NUM_THREADS": "4"},
}
CHOSEN = {name for setting in SETTINGS.values() for name in setting}


def environment(setting: str | None) -> dict[str, str]:
    """This process's environment with the variables of `setting`; None: with none of any setting."""
    rest = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    return rest if setting is None else rest | SETTINGS[setting]


def run_rungs(model: str, setting: str | None, folder: Path) -> dict:
    """The summary of a run of the rungs (see portproof/src/portproof/report/summary.py), whose files go to `folder`."""
    command = [sys.executable, str(RUN_ALL), "--model", model, "--output-dir", str(folder), "--rungs", *RUNGS]
    done = subprocess.run(command, env=environment(setting), capture_output=True, text=True, check=False)
    if not (folder / "summary.json").is_file():
        raise UserError(f"the rungs wrote no summary: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def other_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """The share of the floats that are not the same in both, of the items that both have."""
    pairs = [(array, other[name]) for name, array in one.items() if name in other and array.dtype.kind == "f"]
    pairs = [(a, b) for a, b in pairs if a.shape == b.shape]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.size for a, _ in pairs)


def worst_items(summary: dict) -> dict[str, tuple[float, str]]:
    """{rung: (share of its limit, name) of the item that comes nearest}, of those with a limit above 0 and a number."""
    found = {}
    for rung in summary["rungs"]:
        rows = [row for verdict in rung["verdicts"] for row in verdict["rows"]]
        measured = [row for row in rows if row["limit"] and isinstance(row["difference"], float)]
        shares = [(row["difference"] / row["limit"], row["name"]) for row in measured]
        if shares:
            found[rung["name"]] = max(shares)
    return found


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--setting", choices=SETTINGS, help="run COMMAND under this one")
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="whose rungs run where there is no COMMAND")
    add("command", nargs="*", metavar="COMMAND", help="a command and its arguments, behind --")
    return parser


def main(args: argparse.Namespace) -> int:
    if bool(args.setting) != bool(args.command):
        raise UserError("--setting and a command belong together: --setting sse -- python steps/01_test_forward.py")
    if args.command:
        try:
            return subprocess.run(args.command, env=environment(args.setting), check=False).returncode
        except OSError as error:
            raise UserError(f"{args.command[0]} cannot be run ({error.strerror}): check its name") from error
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        forward = {}
        for setting in tqdm([None, *SETTINGS], "settings", leave=False, disable=None):
            name, out = setting or "as it is", Path(folder, setting or "base")
            summary = run_rungs(args.model, setting, out)
            status |= summary["status"] != "PASS"
            forward[setting] = [load_npy(out / f"forward_{side}.npy") for side in ("ref", "paddle")]
            shares = [f"{other_bits(*pair):.1%}" for pair in zip(forward[None], forward[setting], strict=True)]
            tqdm.write(f"{name}: {summary['status']}, other bits: reference {shares[0]}, port {shares[1]}")
            for rung, (share, item) in worst_items(summary).items():
                tqdm.write(f"  {rung}: the worst item came to {share:.2f} of its limit: {item}")
    print(f"{'FAIL' if status else 'PASS'} {PROG}")
    return status


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
