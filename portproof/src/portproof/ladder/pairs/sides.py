"""What rungs of models share: two models with equal weights, and where the port departs from the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from portproof.backends import backend
from portproof.backends.model import BackendModel
from portproof.compare import FAIL
from portproof.compare.tolerances import UNIT_ROUNDOFF
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import Pair, locate_failure
from portproof.ladder.rung import Rung
from portproof.mapping.by_weights import by_weights


def check_coefficients(dtype: str) -> None:
    """Raise UserError unless this is a precision that an optimizer may keep its rate, momentum and the like in."""
    if dtype not in UNIT_ROUNDOFF:
        raise UserError(f"coefficients {dtype!r}: choose one of {', '.join(UNIT_ROUNDOFF)}")


@dataclass
class Sides:
    """Both models, and how their tensors are called."""

    ref: BackendModel
    port: BackendModel
    tensors: dict[str, str]  # {port's name: reference's key}, see `by_weights`
    modules: Mapping[str, str] | None  # as the user gave them

    @classmethod
    def of(cls, rung: Rung, ref: Any, port: Any, names: Mapping[str, str] | None, device: str) -> Sides | None:
        """None, and the rung fails, unless the weights are equal; raises UserError for what is no model."""
        ref, port = backend("torch").wrap(ref, "reference", device), backend("paddle").wrap(port, "port", device)
        rung.types = rung.types or {name: module.type for name, module in ref.modules.items()}
        tensors, unequal = by_weights(ref, port, names)
        if unequal is not None:
            rung.check(unequal, group=str)
            return None
        return cls(ref, port, tensors, names)

    def keys(self, i: int) -> dict[str, str]:
        """{name: reference's key} of the tensors of the reference (0) or the port (1)."""
        return self.tensors if i else {key: key for key in self.tensors.values()}


def say_location(rung: Rung, pair: Pair, first: int) -> None:
    """If a verdict of the rung from the `first` on has failed, say at which module the port departs; once a rung."""
    failed = [i for i, verdict in enumerate(rung.verdicts) if verdict.status == FAIL and i >= first]
    if not failed or any(verdict.location for verdict in rung.verdicts):
        return
    location = locate_failure(pair, rung.verdicts[first:])
    if location is None:
        rung.say("not located: each module alone gives what the reference's gives; look at what surrounds them")
        return
    rung.say("\n".join(location.lines()))
    rung.verdicts[failed[0]] = replace(rung.verdicts[failed[0]], location=location)
