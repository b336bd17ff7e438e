"""All steps of the ladder, by one command, for one model or both.

  python steps/run_all.py                ends in a table of the steps, and PASS ladder

On the CPU of a Linux machine two steps run at a time. Steps 07 to 09 run for the first model only: 07 in its short mode
unless --full is given, 09 where its exporters are installed. The small model's files go to OUTPUT_DIR, the large one's
to OUTPUT_DIR/mobilenet_v3_large. OUTPUT_DIR/report.html shows all of the run on one page, OUTPUT_DIR/summary.json holds
it for machines.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from mobilenetv3_common.arguments import MODEL_NAMES
from portproof.io.process import add_threads_flag, use_threads
from portproof.ladder import Planned, run_all
from portproof.ladder.all_rungs import can_run_in_lanes
from portproof.report.summary import LeftOut, environment
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run, seed

NAME = "run_all"
ROOT = Path(__file__).resolve().parents[1]
RUNGS = (
    "01_test_forward",
    "02_test_data",
    "03_test_metric",
    "04_test_loss",
    "05_test_backward",
    "06_test_init",
    "07_test_train",
    "08_test_dist",
    "09_test_deploy",
)
# Training runs and launches are slow, and neither how a run goes nor how processes share it depends on the size.
ONCE = ("07_test_train", "08_test_dist", "09_test_deploy")
EXPORTERS = ("onnx", "onnxruntime", "paddle2onnx")  # that rung 09 needs


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", choices=[*MODEL_NAMES, "both"], default="both", help="which of the two sizes")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where both sides run")
    add_threads_flag(parser)
    add("--weights", metavar="FILE", help="weights for both sides, of the one --model, instead of probe weights")
    add("--seed", type=seed, default=0, help="of inputs and probe weights")
    add("--output-dir", default=str(ROOT / "result"), help="where results and logs are written")
    add("--rungs", nargs="+", choices=RUNGS, metavar="STEP", help="these only, such as 01_test_forward")
    add("--language", choices=("en", "zh"), default="en", help="of report.html: English or Chinese")
    add("--full", action="store_true", help="step 07 trains until both sides have learned, a quarter of an hour")
    return parser


def planned(name: str, model: str, args: argparse.Namespace) -> Planned:
    out = Path(args.output_dir) / ("" if model == MODEL_NAMES[0] else model)
    flags = ["--model", model, "--device", args.device, "--seed", str(args.seed), "--output-dir", str(out)]
    flags += ["--weights", args.weights] if args.weights else []
    flags += ["--short"] if name == "07_test_train" and not args.full else []
    return Planned(Path(__file__).with_name(f"{name}.py"), flags, model, is_long=name == "05_test_backward")


def why_left_out(name: str, model: str, first_model: str, args: argparse.Namespace) -> str:
    """Why the step is not run for the model; "" for one that is."""
    missing = [library for library in EXPORTERS if find_spec(library) is None]
    if args.rungs and name not in args.rungs:
        return "--rungs does not name it"
    if name in ONCE and model != first_model:
        return f"it is run for {first_model} only"
    if name == "09_test_deploy" and missing and not args.rungs:
        return f"it needs {', '.join(missing)}: pip install -e '.[deploy]'"
    return ""


def main(args: argparse.Namespace, in_lanes: bool = False) -> int:
    """The ladder's exit status; `in_lanes` of a process that has computed nothing yet has two steps run at a time."""
    models = MODEL_NAMES if args.model == "both" else (args.model,)
    if args.weights and len(models) > 1:
        raise UserError("--weights are one model's: name it with --model")
    steps = {(name, model): why_left_out(name, model, models[0], args) for model in models for name in RUNGS}
    left_out = [LeftOut(*step, reason) for step, reason in steps.items() if reason]
    rungs = [planned(*step, args) for step, reason in steps.items() if not reason]
    print(f"{len(rungs)} steps: PyTorch and PaddlePaddle are imported first", flush=True)
    use_threads(args.threads)
    in_lanes = in_lanes and args.device == "cpu" and len(rungs) > 1 and can_run_in_lanes()
    about = environment(args, "steps/run_all.py")
    how = {"in_lanes": in_lanes, "language": args.language, "left_out": left_out}
    return run_all(rungs, args.output_dir, about, args.device, **how)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args(), in_lanes=True), NAME)
