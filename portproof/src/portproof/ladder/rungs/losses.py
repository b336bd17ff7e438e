"""Two criteria: loss and gradient, in both precisions, on ordinary and awkward inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.backends.question import perturbed
from portproof.compare import Item, Items
from portproof.compare.ruler import UNIT_ROUNDOFF, Ruler
from portproof.ladder.cases import Case, in_precision, losses, prepared
from portproof.ladder.rung import Rung, on_rung
from sturdyio.cli import UserError


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
    """Compare two criteria: functions of a case's tensors that return a scalar tensor of their framework.

    `cases` is {name: (logits, target)}, or any number of arrays; by default `cases.losses(num_classes, seed)`. Floats
    are rounded to float32, and given in float64 (semantic limits) and float32 (kernel limits). The gradient is that of
    the first array of floats, called `wrt`. A module is copied in the same precision. Cases in `keep` (None: all)
    go to the result files, the first one's float32 arrays as "loss" and "gradient", others under "CASE, DTYPE/".

    Refused if a reference's loss or gradient is not finite, or a gradient zero.
    """
    gradient = Item(wrt, "gradient")
    sides = []
    for framework, criterion in ((backend("torch"), ref_criterion), (backend("paddle"), port_criterion)):
        sides.append(partial(_loss_and_gradient, framework, criterion, framework.device(device), gradient))
    for name, case in prepared(losses(num_classes, seed) if cases is None else cases).items():
        if all(array.dtype.kind != "f" for array in case):
            raise UserError(f"case {name!r} has no floating-point array: there is nothing to take the gradient of")
        for dtype in UNIT_ROUNDOFF:
            title = f"{name}, {dtype}"
            both = rung.observe(f"criterion, on {title},", lambda side, *args: side(*args), *sides, case, dtype)
            if both is None:
                break
            ref, port = both
            if gradient not in ref:
                raise UserError(f"the reference's criterion gives {wrt} no gradient, on {name}: it must depend on them")
            if not all(np.isfinite(array).all() for array in ref.values()):
                rung.refuse(f"{name}: the reference itself gives NaN or infinity")
                break
            if not ref[gradient].any():
                rung.refuse(f"{name}: the reference's gradient is zero throughout")
                break
            again = partial(rung.of_ref, f"criterion, on {name},", sides[0], case)
            # There are no weights: in float32 one run tells how the reference rounds.
            options = {"perturbed": None} if dtype == "float32" else {"must_be_judged": list(ref)}
            ruler = Ruler.measured(ref, dtype, again, **options)
            rung.check(ruler.compare(port, title=title, dtype=dtype), group=str)
            if keep is None or name in keep:
                is_first = dtype == "float32" and "loss" not in rung.files[0]
                named = ({item.kind: array for item, array in each.items()} for each in both)
                rung.keep(*named, "" if is_first else f"{title}/")


def _loss_and_gradient(
    backend: Backend,
    criterion: Callable[..., Any],
    device: Any,
    gradient: Item,
    case: Case,
    dtype: str,
    perturbation: int = 0,
) -> Items:
    arrays = in_precision(case, dtype)
    if perturbation:
        rng = np.random.default_rng(perturbation)
        arrays = [perturbed(array, dtype, rng) for array in arrays]
    if isinstance(criterion, backend.module_class):  # its class weights need that precision
        criterion = backend.training.to_device(copy.deepcopy(criterion), device, dtype)
    first = next(i for i, array in enumerate(arrays) if array.dtype.kind == "f")
    leaves = [backend.tensor(array, device, requires_grad=i == first) for i, array in enumerate(arrays)]
    # An operation in place may not change a leaf that needs a gradient.
    given = [leaf.clone() if i == first else leaf for i, leaf in enumerate(leaves)]
    with backend.runs.new_tensors(dtype), backend.runs.exact_constants():
        loss = criterion(*given)
        loss.backward()
    found = {Item("loss", "loss"): loss, gradient: leaves[first].grad}
    return {item: backend.to_array(tensor) for item, tensor in found.items() if tensor is not None}
