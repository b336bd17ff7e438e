"""Two criteria: the loss and its gradient, in both precisions, on ordinary and on awkward inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.compare import Item, compare
from portproof.compare.tolerances import kernel_atol, semantic_atol
from portproof.io.cli import UserError
from portproof.ladder.cases import in_precision, losses, prepared
from portproof.ladder.rung import Rung, on_rung

ATOL = {"float64": semantic_atol, "float32": kernel_atol}


@on_rung
def loss(
    ref_criterion: Callable[..., Any],
    port_criterion: Callable[..., Any],
    cases: Mapping[str, Sequence[np.ndarray]] | None = None,
    *,
    num_classes: int = 100,
    seed: int = 0,
    wrt: str = "logits",
    keep: Collection[str] | None = None,
    device: str = "cpu",
    rung: Rung,
) -> None:
    """Compare two criteria: callables of a case's tensors, of their own framework, that return a scalar tensor.

    `cases` are {name: (logits, target)}, or any other number of arrays; by default those of `cases.losses(num_classes,
    seed)`. Floats are rounded to float32 and given in float64 (semantic limits) and in float32 (kernel limits). The
    first of them gets the gradient, and is called `wrt`. A criterion that is a module is run as a copy in the same
    precision. The cases named in `keep` (None: all) go to the result files, the first one's float32 arrays as "loss"
    and "gradient", others under "CASE, DTYPE/".

    Raises UserError for cases that are none, and for a reference that raises or gives no gradient. A case on which the
    reference is not finite, or all of whose gradients are zero, is refused.
    """
    items = {"loss": ("loss", "loss"), "gradient": (wrt, "gradient")}
    torch, paddle = backend("torch"), backend("paddle")
    for name, arrays in prepared(losses(num_classes, seed) if cases is None else cases).items():
        if all(array.dtype.kind != "f" for array in arrays):
            raise UserError(f"case {name!r} has no floating-point array: there is nothing to take the gradient of")
        inputs = {dtype: in_precision(arrays, dtype) for dtype in ATOL}
        ref = {
            dtype: rung.of_ref(f"criterion, on {name}, {dtype},", _run, torch, ref_criterion, inputs[dtype], device)
            for dtype in ATOL
        }
        if "gradient" not in ref["float64"]:
            raise UserError(f"the reference's criterion gives {wrt} no gradient, on {name}: it must depend on them")
        refusal = _refusal(ref)
        if refusal:
            rung.refuse(f"{name}: {refusal}")
            continue
        for dtype, atol_of in ATOL.items():
            title = f"{name}, {dtype}"
            port = rung.of_port(f"criterion, on {title}", _run, paddle, port_criterion, inputs[dtype], device)
            if port is None:
                break
            named = [
                {Item(*items[key], dtype=dtype): value for key, value in side.items()}
                for side in (ref[dtype], port, atol_of(ref["float64"], ref["float32"]))
            ]
            rung.check(compare(*named, title=title), group=str)
            if keep is None or name in keep:
                is_first = dtype == "float32" and "loss" not in rung.files[0]
                rung.keep(ref[dtype], port, "" if is_first else f"{title}/")


def _run(backend: Backend, criterion: Callable[..., Any], case: Sequence[np.ndarray], device: str) -> dict:
    return backend.loss_and_gradient(criterion, case, backend.device(device))


def _refusal(ref: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Why a port that agrees with the reference on this case would prove nothing; "" if it would."""
    if not all(np.isfinite(array).all() for side in ref.values() for array in side.values()):
        return "the reference itself gives NaN or infinity"
    return "" if ref["float64"]["gradient"].any() else "the reference's gradient is zero throughout"
