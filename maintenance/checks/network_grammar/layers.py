"""Layers, written as the framework's modules or by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maintenance.checks.network_grammar.spelling import Held, Scope, vector
from maintenance.checks.network_grammar.tree import Node

# {name: (PyTorch's module, PaddlePaddle's, PyTorch's function, PaddlePaddle's, a wrong one)}
ACTIVATIONS = {
    "relu": ("ReLU()", "ReLU()", "F.relu({})", "F.relu({})", "F.relu6({})"),
    "gelu": ("GELU()", "GELU()", "F.gelu({})", "F.gelu({})", "F.gelu({}, approximate=True)"),
    "silu": ("SiLU()", "Silu()", "F.silu({})", "F.silu({})", "F.hardswish({})"),
    "tanh": ("Tanh()", "Tanh()", "torch.tanh({})", "paddle.tanh({})", "F.hardtanh({})"),
    "leaky": ("LeakyReLU(0.1)", "LeakyReLU(0.1)", "F.leaky_relu({}, 0.1)", "F.leaky_relu({}, 0.1)", "F.leaky_relu({})"),
    "softplus": ("Softplus()", "Softplus()", "F.softplus({})", "F.softplus({})", "F.softplus({}, beta=2)"),
    "sigmoid": ("Sigmoid()", "Sigmoid()", "torch.sigmoid({})", "F.sigmoid({})", "F.hardsigmoid({})"),
}


def dense(
    s: Scope, site: str, role: str, x: str, n_in: int, n_out: int, parts: Sequence[str] = (), bias: bool = True
) -> str:
    """A linear layer; with `parts` (sites) several in one."""
    leaf = f"{site}.{role}"
    parts = parts or (leaf,)
    style = s.pick("linear", "module", "module", "module", "raw", "weights")
    turned, deeper = s.chance(0.5, "turned"), s.chance(0.1, "one level deeper")
    unused = bias and s.fault(leaf, "bias unused")
    stopped = s.fault(leaf, "weight without gradient")
    if style == "raw":
        s.program.raw.update((leaf, *parts))
    free = s.program.ref is not None and leaf in s.program.ref.raw  # then that is another way to store it
    square = n_in == n_out and len(parts) == 1
    transposed = square and style != "raw" and not free and s.fault(leaf, "weight transposed")
    weight = tuple((f"{part}.weight", (n_out, n_in)) for part in parts)
    vectors = Held(tuple((f"{part}.bias", (n_out,)) for part in parts))
    s.here(leaf)
    if style == "raw":
        w = s.parameter(f"{role}_weight", Held(weight, turned))
        b = s.parameter(f"{role}_bias", vectors) if bias else ""
    else:
        turned = not s.side.torch
        made = f"nn.Linear({n_in}, {n_out * len(parts)}{'' if bias else s.side.no_bias})"
        tensors = {"weight": Held(weight, turned), **({"bias": vectors} if bias else {})}
        if style == "module" and not (unused or stopped or transposed):
            result = s.layer(leaf, role, made, tensors, x, deeper)
            for part in parts:
                s.program.places.setdefault(part, s.program.places[leaf])
            return result
        called = s.registered(leaf, role, made, tensors, deeper) + ("[0]" if deeper else "")
        w, b = f"{called}.weight", f"{called}.bias" if bias else ""
    for part in parts:
        s.program.places.setdefault(part, s.program.places[leaf])
    w = s.side.stop(w) if stopped else w
    product = f"{x} @ {w}" if turned != transposed else f"{x} @ {w}.T"
    return s.let(product if unused or not b else f"{product} + {b}")


def activate(s: Scope, site: str, kind: str, x: str, role: str = "act") -> str:
    leaf, spelled = f"{site}.{role}", ACTIVATIONS[kind]
    s.here(leaf)
    style, deeper = s.pick("activation", "module", "function"), s.chance(0.1, "one level deeper")
    if s.fault(leaf, "activation"):
        if style == "module":
            s.name(role)  # so that others keep theirs
        return s.let(spelled[4].format(x))
    if style == "module":
        return s.layer(leaf, role, f"nn.{spelled[0 if s.side.torch else 1]}", {}, x, deeper)
    return s.let(spelled[2 if s.side.torch else 3].format(x))


def normalize(s: Scope, site: str, options: dict[str, Any], x: str, width: int, rank: int, role: str = "norm") -> str:
    kind, epsilon, leaf = options["norm"], options.get("epsilon", 1e-5), f"{site}.{role}"
    if kind == "none":
        return x
    s.here(leaf)
    epsilon = epsilon * 2 if s.fault(leaf, "epsilon") else epsilon
    if kind == "batch":
        return batch_normalize(s, leaf, options, x, width, rank, epsilon)
    tensors = {"weight": vector(f"{leaf}.weight", width)}
    if kind != "rms":
        tensors["bias"] = vector(f"{leaf}.bias", width)
    style = s.pick(f"{kind} norm", "library", "raw")
    has_class = kind != "rms" or s.side.torch
    if style == "library" and has_class:
        name = {"layer": "LayerNorm", "group": "GroupNorm", "rms": "RMSNorm"}[kind]
        size = f"2, {width}" if kind == "group" else width
        return s.layer(leaf, role, f"nn.{name}({size}, {s.side.epsilon}={epsilon})", tensors, x)
    wrong_axis = kind == "layer" and s.fault(leaf, "axis")
    w = s.parameter(f"{role}_weight", tensors["weight"], start="ones")
    b = s.parameter(f"{role}_bias", tensors["bias"], start="zeros") if kind != "rms" else ""
    if kind == "rms":
        return s.let(f"{x} / {s.t}.sqrt(({x} ** 2).mean(-1, keepdim=True) + {epsilon}) * {w}")
    if kind == "layer":
        axis = 1 if wrong_axis else -1
        centered = s.let(f"{x} - {x}.mean({axis}, keepdim=True)")
        return s.let(f"{centered} / {s.t}.sqrt(({centered} ** 2).mean({axis}, keepdim=True) + {epsilon}) * {w} + {b}")
    groups = s.let(f"{x}.reshape([{x}.shape[0], 2, -1])")
    centered = s.let(f"{groups} - {groups}.mean(-1, keepdim=True)")
    scaled = s.let(f"{centered} / {s.t}.sqrt(({centered} ** 2).mean(-1, keepdim=True) + {epsilon})")
    shape = [1, width] + [1] * (rank - 2)
    return s.let(f"{scaled}.reshape({x}.shape) * {w}.reshape({shape}) + {b}.reshape({shape})")


def batch_normalize(s: Scope, leaf: str, options: dict[str, Any], x: str, width: int, rank: int, epsilon: float) -> str:
    names = ("weight", "bias", *s.side.statistics)
    canonical = ("weight", "bias", "mean", "variance")
    tensors = {name: vector(f"{leaf}.{other}", width) for name, other in zip(names, canonical, strict=True)}
    biased = options.get("biased", False)
    library = s.side.torch != biased  # PaddlePaddle's keeps the biased variance
    style = s.pick("batch norm", "library" if library else "class", "class", "raw")
    momentum = 0.2 if s.fault(leaf, "momentum") else 0.1
    if style == "library":
        momentum = momentum if s.side.torch else 1 - momentum
        made = f"nn.BatchNorm{rank - 2}{s.side.d}({width}, {s.side.epsilon}={epsilon}, momentum={momentum})"
        return s.layer(leaf, "norm", made, tensors, x)
    s.program.helpers["batch_norm"] = s.side.batch_norm_helper()
    how = f"{epsilon}, {momentum}, {not biased}"
    if style == "class":
        s.program.helpers["BatchNorm"] = s.side.batch_norm_class()
        return s.layer(leaf, "norm", f"BatchNorm({width}, {how})", tensors, x)
    w = s.parameter("scale", tensors["weight"], start="ones")
    b = s.parameter("offset", tensors["bias"], start="zeros")
    mean = s.buffer("mean", f"{s.t}.zeros([{width}])", True, tensors[names[2]])
    variance = s.buffer("variance", f"{s.t}.ones([{width}])", True, tensors[names[3]])
    return s.let(f"batch_norm({x}, {mean}, {variance}, {w}, {b}, self.training, {how})")


def convolve(s: Scope, site: str, x: str, n_in: int, n_out: int, size: int, axes: int, role: str = "conv") -> str:
    leaf, padding = f"{site}.{role}", size // 2
    s.here(leaf)
    style, deeper = s.pick("convolution", "module", "module", "bias apart", "raw"), s.chance(0.1, "one level deeper")
    unused = s.fault(leaf, "bias unused")
    wrong = padding > 0 and s.fault(leaf, "padding")
    if wrong and style == "raw":
        x, padding = s.let(f"F.pad({x}, {[0, 2 * padding] * axes})"), 0
    weight = vector(f"{leaf}.weight", n_out, n_in, *[size] * axes)
    bias = vector(f"{leaf}.bias", n_out)
    rest = ", padding_mode='circular'" if wrong else ""
    name = f"nn.Conv{axes}{s.side.d}({n_in}, {n_out}, {size}, padding={padding}{rest}"
    if style == "module" and not unused:
        return s.layer(leaf, role, f"{name})", {"weight": weight, "bias": bias}, x, deeper)
    if style == "module":
        called = s.registered(leaf, role, f"{name})", {"weight": weight, "bias": bias}, deeper) + "[0]" * deeper
        return s.let(f"F.conv{axes}d({x}, {called}.weight, None, padding={padding})")
    if style == "raw":
        w = s.parameter("conv_weight", weight)
        b = s.parameter("conv_bias", bias)
        return s.let(f"F.conv{axes}d({x}, {w}, {'None' if unused else b}, padding={padding})")
    y = s.layer(leaf, role, f"{name}{s.side.no_bias})", {"weight": weight}, x, deeper)
    del s.program.modules[leaf]
    b = s.parameter("conv_bias", bias)
    return y if unused else s.let(f"{y} + {b}.reshape({[1, n_out] + [1] * axes})")


def with_residual(s: Scope, node: Node, x: str, y: str) -> list[str]:
    if not node.options.get("residual"):
        return [y]
    if s.fault(node.site, "residual dropped"):
        return [y]
    factor = "0.5 * " if s.fault(node.site, "constant") else ""
    return [s.let(f"{x} + {factor}{y}")]


def batch_first(s: Scope, x: str) -> str:
    return s.let(s.side.swap(x, 0, 1, 3)) if s.program.sequence_first else x
