"""Weights from one framework to another, by layer type; no bit is lost either way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import numpy as np

from portproof.arrays import in_rows
from sturdyio.cli import UserError

Change = Callable[[np.ndarray], np.ndarray]
Arrays = Mapping[str, np.ndarray]
Types = Mapping[str, str]  # {module: its layer type in PyTorch}


def identity(array: np.ndarray) -> np.ndarray:
    return array


def transpose(array: np.ndarray) -> np.ndarray:
    """(out_features, in_features) <-> (in_features, out_features)."""
    return in_rows(array.T)


def view(change: Change, array: np.ndarray) -> np.ndarray:
    """What `change` gives, without a copy."""
    return array.T if change is transpose else change(array)


Rules = dict[str, tuple[str, Change]]  # {PyTorch's name: (other name, self-inverse change)}

AFFINE: Rules = {"weight": ("weight", identity), "bias": ("bias", identity)}
LINEAR: Rules = {"weight": ("weight", transpose), "bias": ("bias", identity)}
BATCH_NORM: Rules = {
    **AFFINE,
    "running_mean": ("_mean", identity),
    "running_var": ("_variance", identity),
    "num_batches_tracked": ("num_batches_tracked", identity),
}
INSTANCE_NORM: Rules = {"weight": ("scale", identity), "bias": ("bias", identity)}
PRELU: Rules = {"weight": ("_weight", identity)}
RECURRENT_PARTS = product(range(16), ("", "_reverse"), ("weight", "bias"), ("ih", "hh"))
RECURRENT_NAMES = [f"{kind}_{of}_l{layer}{way}" for layer, way, kind, of in RECURRENT_PARTS]
RECURRENT: Rules = {name: (name, identity) for name in RECURRENT_NAMES}

RULES: dict[str, Rules] = {  # by PyTorch's layer type
    **{f"Conv{n}d": AFFINE for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": AFFINE for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": BATCH_NORM for n in (1, 2, 3)},
    "SyncBatchNorm": BATCH_NORM,
    **{f"InstanceNorm{n}d": INSTANCE_NORM for n in (1, 2, 3)},
    **dict.fromkeys(("LayerNorm", "GroupNorm", "Embedding"), AFFINE),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), RECURRENT),
    "Linear": LINEAR,
    "PReLU": PRELU,
}

# For MindSpore. Its fully connected weight is (out, in), too.
GAMMA_BETA: Rules = {"weight": ("gamma", identity), "bias": ("beta", identity)}
MINDSPORE_BATCH_NORM: Rules = {
    **GAMMA_BETA,
    "running_mean": ("moving_mean", identity),
    "running_var": ("moving_variance", identity),
}
MINDSPORE_RULES: dict[str, Rules] = {  # seen to work in MindSpore
    **dict.fromkeys(("Conv2d", "Linear"), AFFINE),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d"), MINDSPORE_BATCH_NORM),
    **dict.fromkeys(("LayerNorm", "GroupNorm"), GAMMA_BETA),
    "Embedding": {"weight": ("embedding_table", identity)},
}

COUNT = "num_batches_tracked"  # not in MindSpore; PyTorch uses it only if momentum is None

POOLS_AND_NORMS = ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "BatchNorm", "InstanceNorm")
PADDLE_TYPES = {  # where the name is another one
    **{f"{layer}{n}D": f"{layer}{n}d" for layer, n in product(("Conv", "Dropout", *POOLS_AND_NORMS), (1, 2, 3))},
    **{f"Conv{n}DTranspose": f"ConvTranspose{n}d" for n in (1, 2, 3)},
    "BatchNorm": "BatchNorm2d",
    "SimpleRNN": "RNN",
    "Silu": "SiLU",
    "Swish": "SiLU",
}

MINDSPORE_TYPES = {
    "Dense": "Linear",
    "HSwish": "Hardswish",
    "HSigmoid": "Hardsigmoid",
    "SequentialCell": "Sequential",
    **{f"Conv{n}dTranspose": f"ConvTranspose{n}d" for n in (1, 2, 3)},
}


def _inverse(table: Mapping[str, Rules]) -> dict[str, Rules]:
    inverse: dict[str, Rules] = {}
    for layer, rules in table.items():
        inverse[layer] = {its_name: (name, change) for name, (its_name, change) in rules.items()}
    return inverse


PADDLE_TO_TORCH, MINDSPORE_TO_TORCH = _inverse(RULES), _inverse(MINDSPORE_RULES)


def _converted(arrays: Arrays, types: Types, table: Mapping[str, Rules]) -> dict[str, np.ndarray]:
    result = {}
    for key, array in arrays.items():
        module, _, leaf = key.rpartition(".")
        rules = table.get(types.get(module, ""), {})
        if leaf not in rules:
            layer = types.get(module, "no layer of this model")
            raise UserError(f"no rule converts {key} ({layer}): is it a weight of this model? check --model and --from")
        name, change = rules[leaf]
        result[f"{module}.{name}"] = change(array)
    return result


def torch_to_paddle(arrays: Arrays, types: Types) -> dict[str, np.ndarray]:
    """To PaddlePaddle's names and layouts; UserError: no rule for a key."""
    return _converted(arrays, types, RULES)


def paddle_to_torch(arrays: Arrays, types: Types) -> dict[str, np.ndarray]:
    """The inverse of `torch_to_paddle`, bit for bit."""
    return _converted(arrays, types, PADDLE_TO_TORCH)


def torch_to_mindspore(arrays: Arrays, types: Types) -> dict[str, np.ndarray]:
    """To MindSpore's names, without counts of batches; UserError: no rule for a key."""
    kept = {key: array for key, array in arrays.items() if key.rpartition(".")[2] != COUNT}
    return _converted(kept, types, MINDSPORE_RULES)


def mindspore_to_torch(arrays: Arrays, types: Types) -> dict[str, np.ndarray]:
    """The inverse of `torch_to_mindspore`, bit for bit; counts of batches are 0."""
    result = _converted(arrays, types, MINDSPORE_TO_TORCH)
    means = [key for key in result if key.endswith(".running_mean")]
    return result | {f"{key.removesuffix('running_mean')}{COUNT}": np.zeros((), np.int64) for key in means}
