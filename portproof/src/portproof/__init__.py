"""Proof that a port of a PyTorch model is exact: run both, compare everything, say where and why they part.

    verdict = portproof.align(ref, port, [images])
    print(verdict)

Importing this imports neither PyTorch nor PaddlePaddle; what needs one does when it is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portproof.io.process import proving
from sturdyio.cli import UserError, user_code

if TYPE_CHECKING:
    import paddle
    import torch

    from portproof.backends.trace import Inputs
    from portproof.ladder.pairs.whole import AlignVerdict
    from portproof.recording.file import Recording

__version__ = "0.1.0"

# Paddle looks for a compiler cache when it is imported, and warns on every run of every command where there is none.
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
    outputs: Mapping[str, str] | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> AlignVerdict:
    """Judge the port `port` against the reference `ref`; neither is changed.

    `inputs` are the positional arguments, or {keyword: argument}: arrays of floats, whole numbers, booleans or complex
    numbers, or nested lists, tuples and dicts of them; at least 2 samples where there is batch norm. `names` fixes part
    of the map, {reference's module: port's module}; the rest is proposed (see mapping.py). `weights`: "probe" puts
    seeded weights under which no fault hides into both, "reference" the reference's own into both, and "own" leaves
    each its own, and compares them. Dropout is off in both modes. `leave_out` names modules of the reference whose own
    values, and those of all in them, are not compared. `outputs` are {reference's: port's} where the two return theirs
    under other keys, attributes or numbers.

    The verdict prints as a report (`print(verdict)`). Its `status` is 0, 1 or 2: aligned, not, or refused because the
    map is ambiguous, outputs have other keys, or the reference gives NaN. It is true if aligned, false if not, and
    raises UserError when a refused one is asked. Its rows are named SECTION/ITEM, `location`
    says where the port departs from the reference, `notes` what the map rests on. Raises UserError for what is no
    model, inputs on which the reference cannot run, and unknown names, modes, precisions and weights.
    """
    from portproof.ladder.pairs.pair import Options
    from portproof.ladder.pairs.whole import judge

    options = Options(names, weights, modes, precisions, leave_out, outputs, seed, device)
    return judge(ref, port, inputs, options)


def assert_aligned(ref: torch.nn.Module, port: paddle.nn.Layer, inputs: Inputs, **options: Any) -> AlignVerdict:
    """`align` for tests: raises AssertionError with the report if it failed or was refused."""
    return _passed(align(ref, port, inputs, **options))


def assert_judged(port: paddle.nn.Layer, recording: Recording | str | Path, **options: Any) -> AlignVerdict:
    """`judge` for tests: raises AssertionError with the report if it failed or was refused."""
    return _passed(judge(port, recording, **options))


def _passed(verdict: AlignVerdict) -> AlignVerdict:
    if verdict.status or not verdict.counted:
        raise AssertionError(f"\n{verdict}")
    return verdict


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
) -> Recording:
    """Record what judging a port needs of the reference `ref`, which is not changed; PaddlePaddle is not needed.

    `inputs`, `modes` and `seed` are those of `align`; `weights` is "probe" or "reference". Only `modules` of the
    reference, and all in them, are recorded to be run alone, so that a fault is located in these only, and the file is
    smaller. `.save(path)` of what is returned writes it, as .safetensors.

    Raises UserError as `align` does, where the reference gives NaN or infinity, and for inputs that no file can hold.
    """
    from portproof.ladder.pairs.pair import Options
    from portproof.recording.record import Recorder

    if weights not in ("probe", "reference"):
        raise UserError(f"weights {weights!r}: choose one of probe, reference")
    options = Options(weights=weights, modes=modes, seed=seed, device=device)
    return Recorder(ref, inputs, options, modules).recording()


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
    outputs: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> AlignVerdict:
    """Judge the port `port` as `align` does, against a reference that `record` has recorded; PyTorch is not needed.

    `recording` is what `record` returned, or the file that it was saved as. `modes` are those that were recorded, or
    some of them. With `own_weights` the port keeps its own, and they are compared: of a recording with the reference's.
    Causes, which are tried on the reference's own modules, are not looked for.

    Raises UserError as `align` does, and for a file that is no recording or is damaged.
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
    options = Options(names, weights, modes, precisions, leave_out, outputs, ref.seed, device)
    verdict = whole.judge(ref, port, ref.inputs, options)
    return replace(verdict, title="judge", notes=[*ref.notes(), *verdict.notes])


@user_code()
def load_reference_weights(
    ref: torch.nn.Module,
    port: paddle.nn.Layer,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    seed: int = 0,
) -> dict[str, str]:
    """Give `port` the weights of `ref`, in its own layouts -> {reference's state_dict key: port's}.

    The map is found as in `align`; where names differ, values on `inputs` have to confirm it. Raises UserError, and
    leaves `port` as it was, where the two do not have the same tensors or the map is not certain.
    """
    from portproof.backends import backend
    from portproof.backends.trace import checked_inputs
    from portproof.mapping.conversion import convert_state_dict, key_map

    keys, _ = key_map(ref, port, checked_inputs(inputs), names, seed)
    arrays = convert_state_dict(backend("torch").state_arrays(ref), ref, port, keys, "the reference's weights")
    backend("paddle").load_arrays(port, arrays, "the reference's weights")
    return keys
