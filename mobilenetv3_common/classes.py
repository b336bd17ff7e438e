"""The last layer, whose size is the number of classes: what weights say of it, and what is to do where two differ."""

from collections.abc import Mapping

import numpy as np

from sturdyio import state_dict

LAST_LAYER = "classifier.3."  # what the names of its parameters begin with


def num_classes_of(arrays: Mapping[str, np.ndarray]) -> int:
    """How many classes a MobileNetV3's weights tell apart; 1000 when they lack the last bias (loading then says so)."""
    return int(np.size(arrays.get("classifier.3.bias", ()))) or 1000


def keep_last_layer(
    given: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """(`given`, with `own`'s last layer if the two differ in the number of classes; the names that were replaced).

    A last layer that differs in anything else stays, for `check_state_dict` to name.
    """
    names = [name for name in own if name.startswith(LAST_LAYER)]
    classes, own_classes = num_classes_of(given), num_classes_of(own)
    fits = all(name in given and given[name].size * own_classes == own[name].size * classes for name in names)
    if classes == own_classes or not fits:
        return dict(given), []
    return {**given, **{name: own[name] for name in names}}, names


def check_state_dict(given: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str) -> None:
    """Raise UserError, naming the first offender of each kind, unless `given` fits `expected` exactly."""
    others = [key for key in expected if key in given and given[key].shape != expected[key].shape]
    fix = "check --model and which framework they are for"
    if given.keys() == expected.keys() and others and all(key.startswith(LAST_LAYER) for key in others):
        fix = "for another number of classes train on from them with --finetune"
    state_dict.check_state_dict(given, expected, what, fix)
