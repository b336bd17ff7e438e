"""What rungs of models share: a pair with equal weights, and where the port departs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portproof.backends import backend
from portproof.compare import FAIL
from portproof.compare.ruler import UNIT_ROUNDOFF
from portproof.ladder.pairs.modes import locate_failure
from portproof.ladder.pairs.pair import Pair
from portproof.ladder.rung import Rung
from portproof.mapping.name_map import by_weights
from sturdyio.cli import UserError


def check_coefficients(dtype: str) -> None:
    """Raise UserError unless optimizers may keep their coefficients in this precision."""
    if dtype not in UNIT_ROUNDOFF:
        raise UserError(f"coefficients {dtype!r}: choose one of {', '.join(UNIT_ROUNDOFF)}")


def equal_pair(rung: Rung, ref: Any, port: Any, given: Mapping[str, str] | None, device: str) -> Pair | None:
    """The pair, made once a rung; None, and a failed rung, if weights differ.

    Raises UserError for what is no model.
    """
    pair = Pair(backend("torch").wrap(ref, "reference", device), backend("paddle").wrap(port, "port", device))
    pair.given = given
    for known in rung.pairs:
        sides = (known.ref, pair.ref), (known.port, pair.port)
        same_models = all(old.model is new.model and old.has_weights_of(new) for old, new in sides)
        if same_models and known.given == given:
            return known
    pair.equal_tensors, unequal = by_weights(pair.ref, pair.port, given)
    rung.types = rung.types or {name: module.type for name, module in pair.ref.modules.items()}
    if unequal is not None:
        rung.check(unequal, group=str)
        return None
    rung.pairs.append(pair)
    return pair


def say_location(rung: Rung, pair: Pair, first: int) -> None:
    """Once a rung: if a verdict from `first` on failed, say where the port departs."""
    failed = [i for i, verdict in enumerate(rung.verdicts) if verdict.status == FAIL and i >= first]
    if not failed or any(verdict.location for verdict in rung.verdicts):
        return
    location = locate_failure(pair, rung.verdicts[first:])
    if location is None:
        rung.say("not located: each module alone gives what the reference's gives; look at what surrounds them")
    else:
        rung.say("\n".join(location.lines()))
        rung.verdicts[failed[0]] = replace(rung.verdicts[failed[0]], location=location)
