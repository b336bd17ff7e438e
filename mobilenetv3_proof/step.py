"""What the steps share: their flags, their weights, and how they print, write and end."""

import argparse
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mobilenetv3_common.arguments import MODEL_NAMES
from mobilenetv3_common.classes import num_classes_of
from mobilenetv3_proof.package import PORT, REF, Package
from portproof.backends.probe import probe_weights
from portproof.compare import FAIL, PASS, REFUSED, Item, Verdict, joined
from portproof.compare.tolerances import largest
from portproof.convert.rules import paddle_to_torch
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, one_line, output_dir, run
from portproof.io.records import save_record, save_text
from portproof.ladder.pair import MODES, Pair, precision_of
from portproof.localize.locate import locate
from portproof.mapping.names import propose
from portproof.report.text import block_of, last_line, render, row_line

ROOT = Path(__file__).resolve().parents[1]
LITE_DATA = ROOT / "lite_data"


def step_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The flags that all steps have."""
    parser = ArgumentParser(prog=prog, description=description, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where both sides run")
    add(
        "--weights",
        metavar="FILE",
        help="weights for both sides (.pth, .safetensors, .pdparams) instead of probe weights",
    )
    add("--seed", type=int, default=0, help="of inputs and probe weights")
    add("--output-dir", default=str(ROOT / "result"), help="where results and the log are written")
    return parser


def run_step(name: str, main: Callable[[argparse.Namespace], "Step"], parser: argparse.ArgumentParser) -> NoReturn:
    """Run a step as a command; a port that raises fails it, with the traceback for whoever ports."""

    def guarded() -> int:
        args = parser.parse_args()
        try:
            return main(args).status
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            print(f"FAIL {name}: it raised {one_line(error)}", flush=True)
            return FAIL

    run(guarded, name)


class Step:
    """One rung of the ladder while it runs: the weights, the verdicts so far, what it will write."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        """Raises UserError for a device that is not there, weights that do not fit, or an unwritable folder."""
        if args.seed < 0:
            raise UserError(f"--seed {args.seed} is negative: choose 0 or more")
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # 10-bit products on cards would drown what is compared
        self.name, self.args = name, args
        self.out = output_dir(args.output_dir)
        self.ref, self.port = Package(REF, args.device), Package(PORT, args.device)
        self.verdicts: list[Verdict] = []
        self.groups: list[Callable[[Item], str]] = []  # the label of an item, for each verdict
        self.log: list[str] = []
        self.curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # what: (reference, port), see plots.curve_plot
        self.pictures: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # tensors (3, H, W) that differ
        versions = [f"{p.backend.name} {p.backend.framework.__version__} ({p.role})" for p in (self.ref, self.port)]
        weights = args.weights or "probe weights"
        self.say(f"{name}: {args.model}, {' and '.join(versions)}, {args.device}, seed {args.seed}, {weights}")
        self.arrays = self._weights()
        self.num_classes = num_classes_of(self.arrays)
        self.types = self.ref.backend.layer_types(self.model(self.ref))

    def _weights(self) -> dict[str, np.ndarray]:
        models, build = self.ref.module("models"), self.ref.module("models").MODELS[self.args.model]
        if self.args.weights is None:
            return probe_weights(build(), self.args.seed)
        path = Path(self.args.weights)
        if path.suffix == ".pdparams":
            types = self.ref.backend.layer_types(build())
            arrays = paddle_to_torch(self.port.module("models").read_weights(path), types)
        else:
            arrays = models.read_weights(path)
        models.load_state_dict(build(num_classes=num_classes_of(arrays)), arrays, f"weights {path}")
        return arrays

    def _kwargs(self, dropout: float | None) -> dict[str, float]:
        """What differs from the models' defaults, and only that: so the defaults are compared too."""
        kwargs = {} if dropout is None else {"dropout": dropout}
        return kwargs if self.num_classes == 1000 else {**kwargs, "num_classes": self.num_classes}

    def model(self, package: Package, dropout: float | None = 0.0) -> Any:
        """A package's model with its own initial weights and the right number of classes; None: default dropout."""
        return package.module("models").MODELS[self.args.model](**self._kwargs(dropout))

    def build(self, package: Package, dtype: str) -> Any:
        """A package's model with the step's weights, in "float32" or "float64", without dropout."""
        return package.build(partial(self.model, package), self.arrays, dtype)

    def say(self, text: str) -> None:
        """Print a line now and keep it for the log."""
        print(text, flush=True)
        self.log.append(text)

    def check(self, verdict: Verdict, group: Callable[[Item], str] = block_of) -> bool:
        """Print the verdict, keep it, and tell whether it passed."""
        self.verdicts.append(verdict)
        self.groups.append(group)
        self.say(render(verdict, group, self.types))
        return verdict.status == PASS

    def refuse(self, reason: str) -> None:
        """Count a reason for which a pass would prove nothing."""
        self.check(Verdict("what the inputs can prove", refusal=reason))

    def check_signal(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Refuse weights under which the signal dies or explodes on its way: any port would pass, or none."""
        for name, array in outputs.items():
            if array.dtype.kind == "f" and not 1e-3 <= largest(array) <= 1e6:
                self.refuse(
                    f"the signal is lost at {name}: its largest value is {largest(array):.1e}; use other weights"
                )
                return

    def pair(self, inputs: Sequence[np.ndarray], cotangent: Sequence[np.ndarray] | None = None) -> Pair:
        """Both models with the weights, as each side's own code loads them, and the map between them; dropout is 0."""
        try:
            port_model, fits = self.build(self.port, "float32"), True
        except UserError:  # the weights do not fit, which is a difference of structure
            port_model, fits = self.model(self.port), False
        ref = self.ref.backend.wrap(self.build(self.ref, "float32"), "reference", self.args.device)
        port = self.port.backend.wrap(port_model, "port", self.args.device)
        loaded = port.arrays()
        names = propose(ref, port, inputs)
        if fits:
            port.load(loaded)  # what the proposal loaded is the reference's
            calls = ref.run(inputs, "float32", train=False, calls=True).record.calls  # a mirror: one name, one module
            names.calls = {k: k for k, call in calls.items() if not call.name or call.name in port.modules}
        return Pair(ref, port, names, inputs, cotangent)

    def locate(self, inputs: Sequence[np.ndarray], cotangent: Sequence[np.ndarray] | None = None) -> None:
        """If a comparison has failed, say at which module the port departs from the reference; done once.

        With a `cotangent` (the loss's gradient for each output) the backward pass is searched too. It is searched in
        the modes and the precision of the items that failed.
        """
        failed = [i for i, verdict in enumerate(self.verdicts) if verdict.status == FAIL]
        if not failed or any(verdict.location for verdict in self.verdicts):
            return
        found = {row.item.mode for i in failed for row in self.verdicts[i].rows if row.status == FAIL}
        modes, dtype = [mode == "train" for mode in MODES if mode in found], precision_of(self.verdicts)
        pair = self.pair(inputs, cotangent)
        location = locate(pair.ref, pair.port, pair.names, inputs, modes=modes, cotangent=cotangent, dtype=dtype)
        if location is None:
            self.say("not located: each module alone gives what the reference's gives; look at what surrounds them")
            return
        self.say("\n".join(location.lines()))
        self.verdicts[failed[0]] = replace(self.verdicts[failed[0]], location=location)

    @property
    def status(self) -> int:
        """FAIL if any verdict failed, REFUSED if any was refused or there is none, else PASS."""
        statuses = {verdict.status for verdict in self.verdicts} or {REFUSED}
        return FAIL if FAIL in statuses else max(statuses)

    def finish(
        self, stem: str, ref: Mapping[Item | str, np.ndarray], port: Mapping[Item | str, np.ndarray], log_stem: str = ""
    ) -> "Step":
        """Write STEM_ref.npy, STEM_paddle.npy and log/STEM_diff.log, print the last line; the step itself."""
        last = last_line(self.name, joined(self.name, self.verdicts))
        for side, arrays in (("ref", ref), ("paddle", port)):
            save_record({str(item): array for item, array in arrays.items()}, self.out / f"{stem}_{side}.npy")
        every = [line for verdict in self.verdicts for line in (verdict.title, *map(row_line, verdict.rows))]
        text = "\n".join([*self.log, last, "", "every item:", *every, ""])
        save_text(text, self.out / "log" / f"{log_stem or stem}_diff.log")
        self.say(last)  # only now: a verdict that could not be written is none
        return self
