"""What a weight file must be before it is loaded: every key, no other key, every shape and dtype, finite values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sturdyio.cli import UserError, existing_file, printable
from sturdyio.files import load_safetensors, read_file


def hash_in_name(path: Path) -> str | None:
    """The hash in a name like `mobilenet_v3_small-047dcff4.pth`; digits alone are taken for a date."""
    named = re.search(r"-([0-9a-f]{8,64})$", path.stem)
    return named[1] if named and re.search("[a-f]", named[1]) else None


def check_hash(path: Path) -> None:
    """Raise UserError when the name carries a hash, as in `mobilenet_v3_small-047dcff4.pth`, that the bytes lack.

    The hash is the start of the file's SHA-256, which is torch.hub's convention.
    """
    named = hash_in_name(path)
    if named is None:
        return
    actual = hashlib.sha256(read_file(path, "weights")).hexdigest()
    if not actual.startswith(named):
        raise UserError(
            f"weights {path} are damaged: their SHA-256 starts {actual[: len(named)]}, the name says {named}; "
            "fetch them again, or rename them if that is no hash"
        )


def read_state_dict(
    path: str | Path,
    suffixes: Sequence[str],
    load: Callable[[Path], dict[str, Any]],
    kind: type,
    to_arrays: Callable[[Mapping[str, Any]], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """The state_dict in `path`, as arrays; the model's if it is a checkpoint of a training run.

    Files of `suffixes` are read by `load`, which gives tensors of type `kind`. Raises UserError when the file is
    missing, damaged, of another kind, or holds anything but arrays.
    """
    path = existing_file(path, "weights")
    check_hash(path)
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    if path.suffix not in suffixes:
        kinds = ", ".join(suffixes)
        raise UserError(f"weights {path} are not {kinds} or .safetensors: convert them to one of these")
    content = load(path)
    state_dict = content.get("model", content)
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, kind) for name, value in state_dict.items()
    ):
        raise UserError(f"weights {path} are no state_dict: save model.state_dict(), tensors by name")
    try:
        return to_arrays(state_dict)
    except (TypeError, RuntimeError, NotImplementedError, MemoryError) as error:  # bfloat16, sparse, quantized, ...
        raise UserError(
            f"weights {path} hold tensors that are no plain arrays ({error}): save them as float32"
        ) from error


def check_state_dict(
    given: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    what: str,
    fix: str = "check which model and framework they are for",
) -> None:
    """Raise UserError, naming the first offender of each kind and the `fix`, unless `given` fits `expected` exactly."""
    common = [key for key in expected if key in given]
    offenders = {
        "missing": [key for key in expected if key not in given],
        "unexpected": [key for key in given if key not in expected],
    }
    for fact in ("shape", "dtype"):
        pairs = {key: (getattr(given[key], fact), getattr(expected[key], fact)) for key in common}
        differing = [f"{key} {own} for {other}" for key, (own, other) in pairs.items() if own != other]
        offenders[f"of another {fact}"] = differing
    problems = [f"{len(found)} {kind} (first: {found[0]})" for kind, found in offenders.items() if found]
    if problems:
        raise UserError(f"{what} do not fit this model, {printable(', '.join(problems))}: {fix}")
    for key in common:
        if not np.isfinite(given[key]).all():
            raise UserError(f"{what} hold NaN or Inf in {key}: use weights from before training diverged")
