"""Two criteria: the loss and its gradient, in both precisions, on ordinary and on awkward inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.backends.question import perturbed
from portproof.compare import Item
from portproof.compare.ruler import UNIT_ROUNDOFF, Ruler
from portproof.ladder.cases import in_precision, losses, prepared
from portproof.ladder.rung import Rung, on_rung
from sturdyio.cli import UserError

Results = dict[Item, np.ndarray]


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
    sides = [
        _Side(framework, criterion, wrt, framework.device(device))
        for framework, criterion in ((backend("torch"), ref_criterion), (backend("paddle"), port_criterion))
    ]
    for name, arrays in prepared(losses(num_classes, seed) if cases is None else cases).items():
        if all(array.dtype.kind != "f" for array in arrays):
            raise UserError(f"case {name!r} has no floating-point array: there is nothing to take the gradient of")
        for dtype in UNIT_ROUNDOFF:
            title = f"{name}, {dtype}"
            both = rung.observe(f"criterion, on {title},", _Side.run, *sides, arrays, dtype)
            if both is None:
                break
            refusal = _refusal(both[0], wrt, name)
            if refusal:
                rung.refuse(f"{name}: {refusal}")
                break
            again = partial(rung.of_ref, f"criterion, on {name},", _Side.run, sides[0], arrays)
            ruler = _ruler(both[0], dtype, again)
            rung.check(ruler.compare(both[1], title=title, dtype=dtype), group=str)
            if keep is None or name in keep:
                is_first = dtype == "float32" and "loss" not in rung.files[0]
                named = ({item.kind: array for item, array in each.items()} for each in both)
                rung.keep(*named, "" if is_first else f"{title}/")


@dataclass(frozen=True)
class _Side:
    """One side's criterion."""

    backend: Backend
    criterion: Callable[..., Any]
    wrt: str  # what gets the gradient is called
    device: Any

    def run(self, case: Sequence[np.ndarray], dtype: str, perturbation: int = 0) -> Results:
        """Its loss on `case` in `dtype`, and the gradient, if there is one; `perturbation` is that of a `Question`."""
        arrays = in_precision(case, dtype)
        if perturbation:
            rng = np.random.default_rng(perturbation)
            arrays = [perturbed(array, dtype, rng) for array in arrays]
        found = self._loss_and_gradient(arrays)
        items = {"loss": Item("loss", "loss"), "gradient": Item(self.wrt, "gradient")}
        return {items[key]: array for key, array in found.items()}

    def _loss_and_gradient(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The "loss" of `arrays`, and its "gradient" with respect to the first floating-point one, in its precision.

        A criterion that is a module is copied. The gradient is missing where there is none.
        """
        backend, criterion = self.backend, self.criterion
        place = next(i for i, array in enumerate(arrays) if array.dtype.kind == "f")
        dtype = str(arrays[place].dtype)
        if isinstance(criterion, backend.module_class):  # its class weights must be of that precision, too
            criterion = backend.training.to_device(copy.deepcopy(criterion), self.device, dtype)
        leaves = [backend.tensor(array, self.device, requires_grad=i == place) for i, array in enumerate(arrays)]
        # An operation in place may not change a leaf that needs a gradient.
        given = [leaf.clone() if i == place else leaf for i, leaf in enumerate(leaves)]
        with backend.runs.new_tensors(dtype), backend.runs.exact_constants():
            loss = criterion(*given)
            loss.backward()
        found = {"loss": loss, "gradient": leaves[place].grad}
        return {name: backend.to_array(tensor) for name, tensor in found.items() if tensor is not None}


def _ruler(ref: Results, dtype: str, again: Callable[..., Results]) -> Ruler:
    """How far the port's may be from `ref`; `again(dtype, perturbation=0)` is the reference's other run."""
    if dtype == "float32":  # what both get is the same, and there are no weights: one run tells how it rounds
        return Ruler.measured(ref, dtype, again, perturbed=None)
    return Ruler.measured(ref, dtype, again, must_be_judged=list(ref))


def _refusal(ref: Results, wrt: str, case: str) -> str:
    """Why a port that agrees with the reference on this case would prove nothing; "" if it would."""
    gradients = [array for item, array in ref.items() if item.kind == "gradient"]
    if not gradients:
        raise UserError(f"the reference's criterion gives {wrt} no gradient, on {case}: it must depend on them")
    if not all(np.isfinite(array).all() for array in ref.values()):
        return "the reference itself gives NaN or infinity"
    return "" if gradients[0].any() else "the reference's gradient is zero throughout"
