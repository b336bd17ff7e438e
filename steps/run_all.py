"""All rungs of the ladder, in one process, for one model or both.

  python steps/run_all.py                ends in a table of the rungs, and PASS ladder

The small model's files go to OUTPUT_DIR, the large one's to OUTPUT_DIR/mobilenet_v3_large.
"""

import argparse
import importlib.util
import time
import traceback
from pathlib import Path
from types import ModuleType

from reprod.align.compare import FAIL, PASS
from reprod.align.report import LAST_WORDS
from reprod.align.step import ROOT
from reprod.recipe.arguments import MODEL_NAMES, HelpFormatter
from reprod.recipe.cli import ArgumentParser, UserError, run

NAME = "run_all"
RUNGS = ("01_test_forward", "02_test_data", "03_test_metric", "04_test_loss", "05_test_backward")


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
    return parser


def run_rung(name: str, model: str, args: argparse.Namespace) -> int:
    """One rung's exit status; a port that raises fails the rung, and the next ones still run."""
    rung = load_rung(name)
    out = Path(args.output_dir) / ("" if model == MODEL_NAMES[0] else model)
    flags = ["--model", model, "--device", args.device, "--seed", str(args.seed), "--output-dir", str(out)]
    if args.weights:
        flags += ["--weights", args.weights]
    try:
        return rung.main(rung.get_args_parser().parse_args(flags)).status
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        print(f"FAIL {name}: it raised, see above", flush=True)
        return FAIL


def main(args: argparse.Namespace) -> int:
    models = MODEL_NAMES if args.model == "both" else (args.model,)
    if args.weights and len(models) > 1:
        raise UserError("--weights are one model's: name it with --model")
    table, worst = [], PASS
    for model in models:
        for name in RUNGS:
            start = time.perf_counter()
            status = run_rung(name, model, args)
            table.append(f"  {LAST_WORDS[status]:<8} {name:<17} {model:<19} {time.perf_counter() - start:5.1f} s")
            worst = FAIL if FAIL in (worst, status) else max(worst, status)
            print(flush=True)
    print("\n".join(table))
    print(f"results and logs: {args.output_dir}")
    print(f"{LAST_WORDS[worst]} ladder")
    return worst


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
