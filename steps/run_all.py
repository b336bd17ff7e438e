"""All rungs of the ladder, in one process, for one model or both.

  python steps/run_all.py                ends in a table of the rungs, and PASS ladder

Rungs 07 and 08 run for the first model only, and 07 in its short mode unless --full is given. The small model's files
go to OUTPUT_DIR, the large one's to OUTPUT_DIR/mobilenet_v3_large. OUTPUT_DIR/report.html shows all of the run on one
page, OUTPUT_DIR/summary.json holds it for machines.
"""

import argparse
import importlib.util
import os
import time
import traceback
from pathlib import Path
from types import ModuleType

import torch

from mobilenetv3_common.arguments import MODEL_NAMES
from mobilenetv3_proof.step import ROOT
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, one_line, output_dir, run
from portproof.report.page import write_page
from portproof.report.summary import LadderResult, RungResult, environment, write_summary
from portproof.report.text import LAST_WORDS

NAME = "run_all"
RUNGS = (
    "01_test_forward",
    "02_test_data",
    "03_test_metric",
    "04_test_loss",
    "05_test_backward",
    "06_test_init",
    "07_test_train",
    "08_test_dist",
)
# Training runs and launches are slow, and neither how a run goes nor how processes share it depends on the size.
ONCE = ("07_test_train", "08_test_dist")


def load_rung(name: str) -> ModuleType:
    """The step script as a module; its name begins with a digit, so `import` cannot."""
    spec = importlib.util.spec_from_file_location(f"step_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", choices=[*MODEL_NAMES, "both"], default="both", help="which of the two sizes")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where both sides run")
    add("--weights", metavar="FILE", help="weights for both sides, of the one --model, instead of probe weights")
    add("--seed", type=int, default=0, help="of inputs and probe weights")
    add("--output-dir", default=str(ROOT / "result"), help="where results and logs are written")
    add("--rungs", nargs="+", choices=RUNGS, default=RUNGS, metavar="RUNG", help="these only, such as 01_test_forward")
    add("--full", action="store_true", help="rung 07 trains until both sides have learned, a quarter of an hour")
    return parser


def run_rung(name: str, model: str, args: argparse.Namespace) -> RungResult:
    """One rung; a port that raises fails it, and the next ones still run."""
    rung = load_rung(name)
    out = Path(args.output_dir) / ("" if model == MODEL_NAMES[0] else model)
    flags = ["--model", model, "--device", args.device, "--seed", str(args.seed), "--output-dir", str(out)]
    if args.weights:
        flags += ["--weights", args.weights]
    if name == "07_test_train" and not args.full:
        flags += ["--short"]
    start = time.perf_counter()
    step, error = None, ""
    try:
        step = rung.main(rung.get_args_parser().parse_args(flags))
    except UserError:
        raise
    except Exception as raised:
        traceback.print_exc()
        error = one_line(raised)
        print(f"FAIL {name}: it raised {error}", flush=True)
    return RungResult(name, model, time.perf_counter() - start, step, error)


def reports(folder: str) -> tuple[Path, Path]:
    """The paths of page and summary, at which nothing lies: what an earlier run wrote must not pass for this one's."""
    paths = output_dir(folder) / "report.html", Path(folder) / "summary.json"
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be replaced ({error.strerror}): delete it or choose another --output-dir"
        ) from error
    return paths


def write_reports(result: LadderResult, page: Path, summary: Path) -> None:
    """Write both; whatever goes wrong is a UserError, since the verdict that was just printed stands."""
    try:
        write_summary(result, summary)
        write_page(result, page)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"no report at {page} ({one_line(error)}): the verdicts are above and in the logs") from error


def machine(device: str) -> dict[str, str]:
    """What torch knows of where it runs."""
    return {
        "device": f"gpu, {torch.cuda.get_device_name()}" if device == "gpu" else device,
        "threads": f"torch {torch.get_num_threads()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}",
    }


def main(args: argparse.Namespace) -> int:
    models = MODEL_NAMES if args.model == "both" else (args.model,)
    if args.weights and len(models) > 1:
        raise UserError("--weights are one model's: name it with --model")
    page, summary = reports(args.output_dir)
    rungs = []
    for model in models:
        for name in args.rungs:
            if model == models[0] or name not in ONCE:
                rungs.append(run_rung(name, model, args))
                print(flush=True)
    result = LadderResult(rungs, environment(args, "steps/run_all.py") | machine(args.device))
    for rung in rungs:
        print(f"  {LAST_WORDS[rung.status]:<8} {rung.name:<17} {rung.model:<19} {rung.seconds:5.1f} s")
    write_reports(result, page, summary)
    print(f"results and logs: {args.output_dir}")
    print(f"report: {page}")
    print(f"{LAST_WORDS[result.status]} ladder")
    return result.status


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
