"""Prove that a port of a PyTorch model is exact: run both, compare, locate the fault.

    verdict = portproof.align(ref, port, [images])
    print(verdict)

PyTorch and PaddlePaddle are imported only when they are needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portproof.exports import on_use
from portproof.io.process import proving
from sturdyio.cli import UserError, user_code

if TYPE_CHECKING:
    import numpy as np
    import paddle
    import torch
    from typing_extensions import ParamSpec  # not in Python 3.9

    from portproof.backends.trace import Inputs
    from portproof.compare import Item, Row, Verdict
    from portproof.ladder.pairs.as_built import Factory
    from portproof.ladder.pairs.whole import AlignVerdict
    from portproof.recording.file import Recording

    P = ParamSpec("P")
else:
    __getattr__ = on_use(__name__)

__version__ = "0.1.0"
__all__ = [
    "AlignVerdict",
    "Item",
    "Recording",
    "Row",
    "UserError",
    "Verdict",
    "align",
    "assert_aligned",
    "assert_judged",
    "judge",
    "judge_onnx",
    "load_reference_weights",
    "record",
]


# Paddle warns at import if the compiler cache ccache is not installed.
warnings.filterwarnings("ignore", message="No ccache found")


@user_code()
@proving()
def align(
    ref: torch.nn.Module,
    port: paddle.nn.Layer,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    weights: str = "probe",
    modes: Sequence[str] = ("eval", "train"),
    precisions: Sequence[str] = ("float64", "float32"),
    leave_out: Sequence[str] = (),
    accept: Sequence[str] = (),
    outputs: Mapping[str, str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    drawn: bool = False,
    factories: tuple[Factory, Factory] = (None, None),
) -> AlignVerdict:
    """Judge `port` against the reference `ref`; neither is changed. Dropout is off in both modes.

    `inputs`: positional arguments, or {keyword: argument}. Arrays of floats, integers, booleans or complex numbers,
    or nested lists, tuples and dicts of them. With batch norm at least 2 samples.
    `names`: {reference's module: port's}, a part of the map; the rest is proposed (see mapping/).
    `weights`: for both sides "probe" (seeded, hide no fault) or "reference"; "own" compares each side's own.
    `leave_out`: modules of the reference whose values, and those of all in them, are not compared; also tensors.
    `accept`: known differences, `NAME[<=LIMIT][: REASON]`, by the name of an item or a pattern such as
    "*.running_var". They neither pass nor fail; above the limit, the largest difference, they fail. It is refused where
    every output of the model in a mode is accepted.
    `outputs`: {reference's: port's} keys, attributes or numbers of outputs, where they differ.
    `drawn`: the inputs are any numbers, so floats in them may be changed where more branches are entered then.
    `factories`: what makes such a reference, and such a port, without arguments. Saved buffers that neither a pass in
    train mode nor the seed changes are also compared as each side was built. Without factories the models count as just
    built, and what is drawn at random fails; with weights="reference" they are then not compared.

    `print(verdict)` gives a report. `status`: 0 aligned, 1 not, 2 refused (ambiguous map, other output keys, NaN in
    the reference). The verdict is true if aligned, false if not; a refused one raises UserError. Rows are named
    SECTION/ITEM; `location` is where the port departs, `notes` what the map rests on.

    Raises UserError for no model, inputs on which the reference fails, and unknown names, modes, precisions or weights.
    """
    from portproof.ladder.pairs.pair import Options
    from portproof.ladder.pairs.whole import judge

    options = Options(
        names, weights, modes, precisions, leave_out, outputs, seed, device, drawn=drawn, factories=factories
    )
    return judge(ref, port, inputs, options, accept)


@user_code()
@proving()
def record(
    ref: torch.nn.Module,
    inputs: Inputs,
    *,
    weights: str = "probe",
    modes: Sequence[str] = ("eval", "train"),
    modules: Collection[str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    drawn: bool = False,
    factory: Factory = None,
    also: Sequence[Inputs] = (),
    images: Sequence[np.ndarray] = (),
    preprocess: Callable[[Any], Any] | None = None,
) -> Recording:
    """Record the reference `ref` for `judge` and `judge_onnx`, without PaddlePaddle; `ref` is not changed.

    `inputs`, `modes`, `seed` and `drawn` as in `align`; `weights`: "probe" or "reference"; `factory`: what makes such a
    `ref`. Only `modules`, and all in them, are recorded alone: faults are located only there, and the file is smaller.
    `also`: further inputs, of other sizes, at which `judge_onnx` judges outputs in eval mode.
    `images`: uint8, height x width x RGB, and `preprocess`, which makes of each, as a PIL image, what the model takes:
    `judge_onnx` compares what is done to images with that.
    `.save(path)` writes .safetensors.

    Raises UserError as `align` does, if the reference gives NaN or infinity, and for inputs that no file can hold.
    """
    from portproof.ladder.pairs.pair import Options
    from portproof.recording.images import prepared
    from portproof.recording.record import Recorder

    if weights not in ("probe", "reference"):
        raise UserError(f"weights {weights!r}: choose one of probe, reference")
    options = Options(weights=weights, modes=modes, seed=seed, device=device, drawn=drawn, factories=(factory, None))
    return Recorder(ref, inputs, options, modules, also, prepared(images, preprocess)).recording()


@user_code()
@proving()
def judge(
    port: paddle.nn.Layer,
    recording: Recording | str | Path,
    *,
    names: Mapping[str, str] | None = None,
    own_weights: bool = False,
    modes: Sequence[str] | None = None,
    precisions: Sequence[str] = ("float64", "float32"),
    leave_out: Sequence[str] = (),
    accept: Sequence[str] = (),
    outputs: Mapping[str, str] | None = None,
    device: str = "cpu",
    factory: Factory = None,
) -> AlignVerdict:
    """Judge `port` as `align` does, against a recorded reference, without PyTorch.

    `recording`: what `record` returned, or its file. `modes`: some of the recorded ones; None: all.
    `factory`: what makes `port`.
    `own_weights`: the port keeps its weights, which are compared with those of a recording with weights="reference".
    Causes are tried as far as that takes no module of the reference (see `localize.layers`).

    Raises UserError as `align` does, and for a file that is damaged or no recording.
    """
    from portproof.ladder.pairs import whole
    from portproof.ladder.pairs.pair import Options
    from portproof.recording.file import Recording

    ref = (recording if isinstance(recording, Recording) else Recording.load(recording)).model()
    modes = ref.modes if modes is None else modes
    if not set(modes) <= set(ref.modes):
        raise UserError(f"modes {modes!r}: the reference was recorded in {' and '.join(ref.modes)} mode: judge these")
    if own_weights and ref.weights == "probe":
        raise UserError("the port's own weights have no equal in a recording of probe weights: record the reference's")
    weights = "own" if own_weights else "reference"
    factories = None, factory
    options = Options(names, weights, modes, precisions, leave_out, outputs, ref.seed, device, factories=factories)
    verdict = whole.judge(ref, port, ref.inputs, options, accept)
    return replace(verdict, title="judge", notes=[*ref.notes(), *verdict.notes])


@user_code()
@proving()
def judge_onnx(
    graph: str | Path,
    recording: Recording | str | Path,
    *,
    preprocessing: str | Path | None = None,
    engine: bool = True,
) -> AlignVerdict:
    """Judge an exported `graph`, an .onnx file of any exporter, against a recorded reference, without a framework.

    `recording`: what `record` returned, or its file, in eval mode, with the weights that the graph has: the model's own
    with weights="reference". The graph is evaluated in float64 by onnx's reference, and every module's output searched
    in it by value; the first that it lacks is the verdict's `location`. Where batch norm was folded in float32, limits
    allow for that rounding. With `engine` ONNX Runtime's outputs are judged by float32's limits at the recorded inputs
    and at those of record(also=), and have to be the same twice.
    `preprocessing`: a JSON of what is done to images, judged on those of record(images=); see `exported.preprocessing`.

    Raises UserError for a file that is no graph, other weights, another number of inputs, and as `judge` does.
    """
    from portproof.exported import judge as exported
    from portproof.recording.file import Recording

    ref = (recording if isinstance(recording, Recording) else Recording.load(recording)).model()
    return exported.judge(graph, ref, preprocessing, engine)


@user_code()
def load_reference_weights(
    ref: torch.nn.Module,
    port: paddle.nn.Layer,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    seed: int = 0,
) -> dict[str, str]:
    """Load the weights of `ref` into `port`, in its layouts -> {reference's state_dict key: port's}.

    The map is found as in `align`; where names differ, values on `inputs` confirm it. Raises UserError, and leaves
    `port` as it was, if the tensors differ or the map is not certain.
    """
    from portproof.backends import backend
    from portproof.backends.trace import checked_inputs
    from portproof.mapping.conversion import convert_state_dict, key_map

    keys, _ = key_map(ref, port, checked_inputs(inputs), names, seed)
    arrays = convert_state_dict(backend("torch").state_arrays(ref), ref, port, keys, "the reference's weights")
    backend("paddle").load_arrays(port, arrays, "the reference's weights")
    return keys


def _like(function: Callable[P, AlignVerdict]) -> Callable[[Callable[..., AlignVerdict]], Callable[P, AlignVerdict]]:
    """For type checkers: a decorated function takes what `function` takes."""
    return lambda decorated: decorated


@_like(align)
def assert_aligned(ref: torch.nn.Module, port: paddle.nn.Layer, inputs: Inputs, **options: Any) -> AlignVerdict:
    """`align` for tests: raises AssertionError with the report unless it passed."""
    return _passed(align(ref, port, inputs, **options))


@_like(judge)
def assert_judged(port: paddle.nn.Layer, recording: Recording | str | Path, **options: Any) -> AlignVerdict:
    """`judge` for tests: raises AssertionError with the report unless it passed."""
    return _passed(judge(port, recording, **options))


def _passed(verdict: AlignVerdict) -> AlignVerdict:
    if verdict.status or not verdict.counted:
        raise AssertionError(f"\n{verdict}")
    return verdict
