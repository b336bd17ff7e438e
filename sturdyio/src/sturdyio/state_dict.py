"""What a weight file must be before it is loaded: exactly the model's keys, shapes and dtypes, and finite values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sturdyio.cli import UserError, existing_file, printable
from sturdyio.files import Arrays, load_safetensors, read_file


def hash_in_name(path: Path) -> str | None:
    """The hash in a name like `mobilenet_v3_small-047dcff4.pth`; digits alone are taken for a date."""
    named = re.search(r"-([0-9a-f]{8,64})$", path.stem)
    return named[1] if named and re.search("[a-f]", named[1]) else None


def check_hash(path: Path) -> None:
    """Raise UserError when the name carries a hash that the bytes lack: the start of their SHA-256, as of torch.hub."""
    named = hash_in_name(path)
    if named is None:
        return
    actual = hashlib.sha256(read_file(path, "weights")).hexdigest()
    if not actual.startswith(named):
        damage = f"their SHA-256 starts {actual[: len(named)]}, the name says {named}"
        fix = "fetch them again, or rename them if that is no hash"
        raise UserError(f"weights {path} are damaged: {damage}; {fix}")


def read_state_dict(
    path: str | Path,
    suffixes: Sequence[str],
    load: Callable[[Path], dict[str, Any]],
    kind: type,
    to_arrays: Callable[[Mapping[str, Any]], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """The state_dict in `path`, as arrays; the model's if it is a checkpoint of a training run.

    `load` reads files of `suffixes`, and gives tensors of type `kind`. Raises UserError for any other file or content.
    """
    path = existing_file(path, "weights")
    check_hash(path)
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    if path.suffix not in suffixes:
        raise UserError(f"weights {path} are not {', '.join(suffixes)} or .safetensors: convert them to one of these")
    content = load(path)
    state_dict = content.get("model", content)
    items = state_dict.items() if isinstance(state_dict, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(value, kind) for name, value in items):
        raise UserError(f"weights {path} are no state_dict: save model.state_dict(), tensors by name")
    try:
        return to_arrays(state_dict)
    except (TypeError, RuntimeError, NotImplementedError, MemoryError) as error:  # bfloat16, sparse, quantized, ...
        problem = f"weights {path} hold tensors that are no plain arrays ({error})"
        raise UserError(f"{problem}: save them as float32") from error


FIX = "check which model and framework they are for"


def check_state_dict(given: Arrays, expected: Arrays, what: str, fix: str = FIX) -> None:
    """Raise UserError, naming the first offender of each kind and the `fix`, unless `given` fits `expected`."""
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
