"""Blocks, and the network that they make."""

from __future__ import annotations

from collections.abc import Sequence

from maintenance.checks.network_grammar.layers import activate, batch_first, convolve, dense, normalize, with_residual
from maintenance.checks.network_grammar.spelling import Held, Scope, block, vector
from maintenance.checks.network_grammar.tree import BATCH, PIXELS, TIME, WORDS, Node, Tree


@block()
def mlp(s: Scope, node: Node, x: str) -> list[str]:
    stopped = s.fault(node.site, "input of the branch without gradient")
    y = normalize(s, node.site, node.options, s.side.stop(x) if stopped else x, node.width, 3)
    y = dense(s, node.site, "first", y, node.width, node.width + 2)
    y = activate(s, node.site, node.options["activation"], y)
    return with_residual(s, node, x, dense(s, node.site, "second", y, node.width + 2, node.width))


@block("attention", "cross", "masked")
def attention(s: Scope, node: Node, x: str, other: str = "") -> list[str]:
    start = x
    y = normalize(s, node.site, node.options, x, node.width, 3)
    memory, mask = (other, "") if node.kind == "cross" else (y, other)
    y = attend(s, node, y, memory, mask, node.options["heads"], outside_is_first=node.kind == "cross")
    return with_residual(s, node, start, y)


def attend(s: Scope, node: Node, x: str, memory: str, mask: str, heads: int, outside_is_first: bool = False) -> str:
    """`outside_is_first`: the memory has batches first in any layout."""
    site, width, name = node.site, node.width, s.t
    size = width // heads
    alone = memory == x
    x = batch_first(s, x)
    memory = x if alone else memory if outside_is_first else batch_first(s, memory)
    fused = alone and s.pick("attention", "fused", "apart") == "fused"
    if fused:
        s.program.fused.add(site)
        y = dense(s, site, "qkv", x, width, width, [f"{site}.{part}" for part in "qkv"])
        q, k, v = s.let_all(3, f"{y}.chunk(3, -1)")
        both = s.program.ref is not None and site in s.program.ref.fused
        if both and s.fault(site, "q and k exchanged"):
            q, k = k, q
    else:
        q, k, v = (dense(s, site, part, x if part == "q" else memory, width, width) for part in "qkv")
    in_parts = f".reshape([{BATCH}, -1, {heads}, {size}])"
    q, k, v = (s.let(s.side.swap(part + in_parts, 1, 2, 4)) for part in (q, k, v))
    if node.options.get("rotary"):
        q, k = rotate(s, node, q, k, size)
    scale = f" * {size} ** -0.5" if s.chance(0.5, "power") else f" / math.sqrt({size})"
    scale = "" if s.fault(site, "scale missing") else scale
    scores = s.let(f"{q} @ {s.side.swap(k, 2, 3, 4)}{scale}")
    low = s.pick("hidden", "-1e9", "float('-inf')")
    if node.options.get("causal"):
        diagonal = 1 + s.fault(site, "mask off by one")
        triangle = f"np.triu(np.ones([{TIME}, {TIME}]), {diagonal})"
        made = s.side.constant(triangle, "bool")
        hidden = (
            s.buffer("causal", made, s.chance(0.3, "saved"))
            if s.pick("table", "buffer", "forward") == "buffer"
            else made
        )
        scores = s.let(f"{scores}.masked_fill({hidden}, {low})")
    if mask:
        kept = "" if s.fault(site, "mask inverted") else "~"
        if s.pick("mask", "fill", "where") == "fill":
            scores = s.let(f"{scores}.masked_fill({kept}{mask}[:, None, None, :], {low})")
        else:
            kept = "" if kept else "~"
            scores = s.let(f"{name}.where({kept}{mask}[:, None, None, :], {scores}, {name}.full_like({scores}, -1e9))")
    axis = -2 if s.fault(site, "axis of softmax") else -1
    y = s.let(f"F.softmax({scores}, {axis}) @ {v}")
    merged = y if heads > 1 and s.fault(site, "heads merged in the wrong order") else s.side.swap(y, 1, 2, 4)
    y = s.let(f"{merged}.reshape([{BATCH}, -1, {width}])")
    return batch_first(s, dense(s, site, "out", y, width, width))


def rotate(s: Scope, node: Node, q: str, k: str, size: int) -> list[str]:
    base = "1000.0" if s.fault(node.site, "rotary base") else "10000.0"
    form = s.pick("rotary", "complex", "cosine")
    where = s.pick("table", "saved buffer", "unsaved buffer", "forward")
    angles = f"np.outer(np.arange({TIME}), {base} ** (-np.arange(0, {size}, 2) / {size}))"
    only_q = s.fault(node.site, "rotary on q alone")

    def table(function: str) -> str:
        if where == "forward" and s.side.torch:
            return s.let(f"torch.tensor(np.{function}({angles}), dtype={q}.dtype)")
        if where == "forward":
            return s.let(f"paddle.to_tensor(np.{function}({angles})).astype({q}.dtype)")
        return s.buffer(function, s.side.constant(f"np.{function}({angles})", "float32"), where == "saved buffer")

    def turned(x: str) -> str:
        if form == "complex":
            pairs = s.let(f"{s.side.to_complex}({x}.reshape([*{x}.shape[:-1], -1, 2]))")
            return s.let(f"{s.side.to_real}({pairs} * {waves}).flatten(-2)")
        a, b = s.let_all(2, f"{x}[..., 0::2], {x}[..., 1::2]")
        parts = f"{a} * {cos} - {b} * {sin}, {a} * {sin} + {b} * {cos}"
        return s.let(f"{s.t}.stack([{parts}], -1).flatten(-2)")

    if form == "complex" and where != "forward":
        waves = s.buffer("waves", s.side.constant(f"np.exp(1j * {angles})", "complex64"), where == "saved buffer")
    else:
        cos, sin = table("cos"), table("sin")
        waves = s.let(f"{s.t}.complex({cos}, {sin})") if form == "complex" else ""
    return [turned(q), k if only_q else turned(k)]


@block()
def gated(s: Scope, node: Node, x: str) -> list[str]:
    gate, site, width = node.options["gate"], node.site, node.width
    style = s.pick("gate", "fused", "apart", "glu" if gate == "sigmoid" else "fused")
    if style == "apart":
        value = dense(s, site, "value", x, width, width)
        other = dense(s, site, "gate", x, width, width)
    else:
        s.program.fused.add(site)
        both = dense(s, site, "both", x, width, width, [f"{site}.value", f"{site}.gate"])
        if style == "glu":
            return [s.let(f"F.glu({both}, -1)")]
        value, other = s.let_all(2, f"{both}.chunk(2, -1)")
        if s.program.ref and site in s.program.ref.fused and s.fault(site, "value and gate exchanged"):
            value, other = other, value
    stopped = s.fault(site, "gate without gradient")
    other = activate(s, site, gate, other)
    return [s.let(f"{value} * {s.side.stop(other) if stopped else other}")]


@block()
def low_rank(s: Scope, node: Node, x: str) -> list[str]:
    """Two equal matrices beside the layer's own."""
    y = dense(s, node.site, "base", x, node.width, node.width)
    z = dense(s, node.site, "a", x, node.width, node.width, bias=False)
    z = dense(s, node.site, "b", z, node.width, node.width, bias=False)
    scale = 0.4 if s.fault(node.site, "constant") else 0.5
    return [s.let(f"{y} + {scale} * {z}")]


@block("branches", "image_branches")
def branches(s: Scope, node: Node, x: str) -> list[str]:
    a, b = (s.call(child, x)[0] for child in node.children)
    if s.fault(node.site, "branch without gradient"):
        b = s.side.stop(b)
    if node.options["join"] == "sum":
        return [s.let(f"{a} + 2.0 * {b}")]
    if node.options["join"] == "product":
        return [s.let(f"{a} * {s.t}.tanh({b})")]
    axis = -1 if node.kind == "branches" else 1
    parts = [x, a, b]
    if s.fault(node.site, "order of concat"):
        parts = [a, x, b]
    y = s.let(f"{s.side.concat}([{', '.join(parts)}], {axis})")
    if node.kind == "branches":
        return [dense(s, node.site, "join", y, 3 * node.width, node.width)]
    return [convolve(s, node.site, y, 3 * node.width, node.width, 1, 2, "join")]


@block()
def recurrent(s: Scope, node: Node, x: str) -> list[str]:
    cell, width, site = node.options["cell"], node.width, node.site
    gates = width * (3 if cell == "GRU" else 4)
    style = s.pick("recurrent", "library", "library", "by hand")
    shapes = {"weight_ih": (gates, width), "weight_hh": (gates, width), "bias_ih": (gates,), "bias_hh": (gates,)}
    leaf = f"{site}.cell"
    s.here(leaf)
    held = {f"{name}_l0": vector(f"{leaf}.{name}", *shape) for name, shape in shapes.items()}
    if style == "library":
        natural = s.program.sequence_first == s.chance(
            0.7, "batch first"
        )  # whether time is second for the library, too
        time_first = s.program.sequence_first if natural else not s.program.sequence_first
        word = f"batch_first={not time_first}" if s.side.torch else f"time_major={time_first}"
        given = s.let(s.side.swap(x, 0, 1, 3)) if time_first != s.program.sequence_first else x
        reverse = s.fault(site, "time reversed")
        given = s.let(f"{given}.flip([{1 - time_first}])") if reverse else given
        called = s.registered(leaf, "rnn", f"nn.{cell}({width}, {width}, {word})", held)
        s.program.modules[leaf] = called
        y = s.let(f"{called}({given})[0]")
        y = s.let(s.side.swap(y, 0, 1, 3)) if time_first != s.program.sequence_first else y
        return with_residual(s, node, x, y)
    wi, wh, bi, bh = (s.parameter(name[:-3], each) for name, each in held.items())
    given = batch_first(s, x)
    unused = s.fault(site, "bias unused")
    s.code += [f"state = cell = {s.t}.zeros_like({given}[:, 0])", "states = []", f"for t in range({TIME}):"]
    add = [f"a = {given}[:, t] @ {wi}.T + {bi}", f"b = state @ {wh}.T" + ("" if unused else f" + {bh}")]
    sigmoid = f"{s.t}.sigmoid" if s.side.torch else "F.sigmoid"
    if cell == "GRU":
        add += ["ra, za, na = a.chunk(3, -1)", "rb, zb, nb = b.chunk(3, -1)", f"z = {sigmoid}(za + zb)"]
        inside = f"{s.t}.tanh(na + {sigmoid}(ra + rb) * nb)"
        mixed = f"z * {inside} + (1 - z) * state" if s.fault(site, "update gate inverted") else ""
        add += [f"state = {mixed or f'(1 - z) * {inside} + z * state'}"]
    else:
        add += ["i, f, g, o = (a + b).chunk(4, -1)"]
        tanh = "" if s.fault(site, "tanh of the state missing") else f"{s.t}.tanh"
        add += [f"cell = {sigmoid}(f) * cell + {sigmoid}(i) * {s.t}.tanh(g)", f"state = {sigmoid}(o) * {tanh}(cell)"]
    s.code += [f"    {line}" for line in (*add, "states.append(state)")]
    return with_residual(s, node, x, batch_first(s, s.let(f"{s.t}.stack(states, 1)")))


@block()
def transformer(s: Scope, node: Node, x: str) -> list[str]:
    site, width, first, act = node.site, node.width, node.options["first"], node.options["activation"]
    hidden, heads = width + 2, 2
    style = s.pick("transformer", "library", "by hand")
    s.here(f"{site}.layer")
    if style == "library":
        wrong = s.fault(f"{site}.layer", "norm first" if not first else "norm last")
        how = f"{width}, {heads}, {hidden}, dropout=0.0, activation='{act}'"
        order = "norm_first" if s.side.torch else "normalize_before"
        given = x if s.side.torch else batch_first(s, x)
        rest = f", batch_first={not s.program.sequence_first}" if s.side.torch else ""
        made = f"nn.TransformerEncoderLayer({how}, {order}={first != wrong}{rest})"
        y = s.layer(f"{site}.layer", "layer", made, library_tensors(s, site, width, hidden), given)
        inside, parts = s.program.places[f"{site}.layer"], ("norm1", "norm2", "first", "second")
        names = ("norm1", "norm2", "linear1", "linear2")
        s.program.places |= {f"{site}.{part}": [f"{inside[0]}.{name}"] for part, name in zip(parts, names, strict=True)}
        s.program.places[site] = [*s.program.places[site], *inside, f"{inside[0]}.self_attn"]
        return [y if s.side.torch else batch_first(s, y)]

    def attended(x: str) -> str:
        return attend(s, node, x, x, "", heads)

    def fed(x: str) -> str:
        y = dense(s, site, "first", x, width, hidden)
        return dense(s, site, "second", activate(s, site, act, y), hidden, width)

    dropped = not first and s.fault(site, "residual dropped")
    for number, part in (("norm1", attended), ("norm2", fed)):
        if first:
            x = s.let(f"{x} + {part(normalize(s, site, {'norm': 'layer'}, x, width, 3, number))}")
        else:
            y = part(x)
            y = y if dropped and number == "norm2" else s.let(f"{x} + {y}")
            x = normalize(s, site, {"norm": "layer"}, y, width, 3, number)
    return [x]


def library_tensors(s: Scope, site: str, width: int, hidden: int) -> dict[str, Held]:
    turned, found = not s.side.torch, {}

    def linear(key: str, role: str, n_in: int, n_out: int) -> None:
        found[f"{key}.weight"] = Held(((f"{site}.{role}.weight", (n_out, n_in)),), turned)
        found[f"{key}.bias"] = vector(f"{site}.{role}.bias", n_out)

    if s.side.torch:
        found["self_attn.in_proj_weight"] = Held(tuple((f"{site}.{part}.weight", (width, width)) for part in "qkv"))
        found["self_attn.in_proj_bias"] = Held(tuple((f"{site}.{part}.bias", (width,)) for part in "qkv"))
    else:
        for part in "qkv":
            linear(f"self_attn.{part}_proj", part, width, width)
    linear("self_attn.out_proj", "out", width, width)
    linear("linear1", "first", width, hidden)
    linear("linear2", "second", hidden, width)
    for norm in ("norm1", "norm2"):
        found[f"{norm}.weight"] = vector(f"{site}.{norm}.weight", width)
        found[f"{norm}.bias"] = vector(f"{site}.{norm}.bias", width)
    return found


@block()
def straight_through(s: Scope, node: Node, x: str) -> list[str]:
    y = dense(s, node.site, "first", x, node.width, node.width)
    hard, style = f"{s.t}.sign({y})", s.pick("straight-through", "difference", "sum")
    if s.fault(node.site, "straight-through missing"):
        y = s.let(hard)
    elif style == "difference":
        y = s.let(f"{y} + {s.side.stop(f'({hard} - {y})')}")
    else:
        y = s.let(f"{s.side.stop(hard)} + ({y} - {s.side.stop(y)})")
    y = dense(s, node.site, "second", y, node.width, node.width)
    return with_residual(s, node, x, y)


@block()
def scales(s: Scope, node: Node, x: str) -> list[str]:
    """Raw parameters of equal shapes, in a list or apart."""
    held = [vector(f"{node.site}.{i}.scale", node.width) for i in range(3)]
    if s.pick("parameters", "list", "apart") == "list":
        name = s.name("scales")
        s.init.append(f"self.{name} = nn.ParameterList([{s.side.parameter([node.width])} for _ in range(3)])")
        s.program.tensors |= {f"{s.path}{name}.{i}": each for i, each in enumerate(held)}
        called = [f"self.{name}[{i}]" for i in range(3)]
    else:
        called = [s.parameter(f"scale_{i}", each) for i, each in enumerate(held)]
    again = s.fault(node.site, "the first parameter used twice")
    called[1] = called[0] if again else called[1]
    for parameter in called:
        x = s.let(f"{x} * {parameter} + {s.t}.tanh({x})")
    return [x]


@block()
def clip(s: Scope, node: Node, x: str) -> list[str]:
    y = dense(s, node.site, "first", x, node.width, node.width)
    high = 1.1 if s.fault(node.site, "constant") else 1.0
    style = s.pick("clip", "clip", "where", "minimum")
    if style == "clip":
        return [s.let(f"{s.side.clip}({y}, -1.0, {high})")]
    if style == "where":
        y = s.let(f"{s.t}.where({y} > {high}, {s.t}.full_like({y}, {high}), {y})")
        return [s.let(f"{s.t}.where({y} < -1.0, {s.t}.full_like({y}, -1.0), {y})")]
    y = s.let(f"{s.t}.minimum({y}, {s.t}.full_like({y}, {high}))")
    return [s.let(f"{s.t}.maximum({y}, {s.t}.full_like({y}, -1.0))")]


@block()
def shift(s: Scope, node: Node, x: str) -> list[str]:
    axis = 0 if s.program.sequence_first else 1
    first = 2 if s.fault(node.site, "slice off by one") else 1
    dots = ":, " * axis
    if s.pick("shift", "slices", "roll") == "slices":
        moved = s.let(f"{s.side.concat}([{x}[{dots}{first}:], {x}[{dots}:{first}]], {axis})")
    else:
        moved = s.let(f"{s.t}.roll({x}, {-first}, {axis})")
    return [s.let(f"{x} + {dense(s, node.site, 'first', moved, node.width, node.width)}")]


@block()
def spectral(s: Scope, node: Node, x: str) -> list[str]:
    leaf, width = f"{node.site}.first", node.width
    s.here(leaf)
    made = f"nn.utils.spectral_norm(nn.Linear({width}, {width + 1}))"
    parts = ((f"{leaf}.weight", (width + 1, width)),)
    tensors = {"weight_orig": Held(parts, not s.side.torch), "bias": vector(f"{leaf}.bias", width + 1)}
    tensors |= {"weight_u": vector(f"{leaf}.unit_u", width + 1), "weight_v": vector(f"{leaf}.unit_v", width)}
    y = s.layer(leaf, "first", made, tensors, x)
    return [dense(s, node.site, "second", y, width + 1, width)]


@block()
def convolution(s: Scope, node: Node, x: str) -> list[str]:
    """Over time."""
    y = s.let(s.side.swap(batch_first(s, x), 1, 2, 3))
    y = convolve(s, node.site, y, node.width, node.width, node.options["size"], 1)
    y = normalize(s, node.site, node.options, y, node.width, 3)
    y = activate(s, node.site, node.options["activation"], y)
    return with_residual(s, node, x, batch_first(s, s.let(s.side.swap(y, 1, 2, 3))))


@block()
def detached(s: Scope, node: Node, x: str) -> list[str]:
    missing = s.fault(node.site, "detach missing")
    wrong = s.fault(node.site, "detach in the wrong place")
    y = dense(s, node.site, "first", x, node.width, node.width)
    if node.options["what"] == "gate":
        y = activate(s, node.site, "sigmoid", y)
    kept = y if missing or wrong else s.side.stop(y)
    x = s.side.stop(x) if wrong else x
    return [s.let(f"{x} * {kept}" if node.options["what"] == "gate" else f"{x} + 0.5 * {kept}")]


@block()
def repeated(s: Scope, node: Node, x: str) -> list[str]:
    return s.call(node.children[0], x, times=1 if s.fault(node.site, "called once") else 2, own=True)


@block()
def sampling(s: Scope, node: Node, x: str) -> list[str]:
    """Random in train mode alone."""
    mean = dense(s, node.site, "mean", x, node.width, node.width)
    log = dense(s, node.site, "log", x, node.width, node.width)
    factor = 1.0 if s.fault(node.site, "constant") else 0.5
    y = s.let(f"{mean}")
    spread = f"{s.t}.exp({factor} * {log})"
    s.code += ["if self.training:", f"    {y} = {mean} + {s.t}.randn_like({mean}) * {spread}"]
    return [s.let(f"{y} + 0.1 * {spread}")]


@block()
def quantizer(s: Scope, node: Node, x: str) -> list[str]:
    """The nearest row of a book, straight through, with its loss."""
    book = s.parameter("book", vector(f"{node.site}.book", 7, node.width))
    y = dense(s, node.site, "first", x, node.width, node.width)
    if s.pick("distance", "difference", "expanded") == "difference":
        distances = s.let(f"(({y}[:, :, None] - {book}) ** 2).sum(-1)")
    else:
        distances = s.let(f"({y} ** 2).sum(-1, keepdim=True) - 2 * {y} @ {book}.T + ({book} ** 2).sum(-1)")
    nearest = s.let(f"{book}[{distances}.argmin(-1)]")
    stop, share = s.side.stop, 0.5 if s.fault(node.site, "constant") else 0.25
    pair = (y, nearest) if not s.fault(node.site, "detach in the wrong place") else (nearest, y)
    loss = s.let(f"(({stop(pair[0])} - {pair[1]}) ** 2).mean() + {share} * (({pair[0]} - {stop(pair[1])}) ** 2).mean()")
    if s.fault(node.site, "straight-through missing"):
        return [s.let(f"{nearest} * 1.0"), loss]
    return [s.let(f"{y} + {stop(f'({nearest} - {y})')}"), loss]


# Blocks of images


@block()
def conv(s: Scope, node: Node, x: str) -> list[str]:
    y = convolve(s, node.site, x, node.width, node.width, node.options["size"], 2)
    y = normalize(s, node.site, node.options, y, node.width, 4)
    return with_residual(s, node, x, activate(s, node.site, node.options["activation"], y))


@block()
def squeeze(s: Scope, node: Node, x: str) -> list[str]:
    style = s.pick("pool", "mean", "adaptive")
    if s.fault(node.site, "sum for mean"):
        y = s.let(f"{x}.sum([2, 3])")
    elif style == "mean":
        y = s.let(f"{x}.mean([2, 3])")
    else:
        y = s.let(f"F.adaptive_avg_pool2d({x}, 1).flatten(1)")
    y = activate(s, node.site, "relu", dense(s, node.site, "first", y, node.width, 4))
    y = activate(s, node.site, "sigmoid", dense(s, node.site, "second", y, 4, node.width), "gate")
    return [s.let(f"{x} * {y}[:, :, None, None]")]


@block()
def tokens(s: Scope, node: Node, x: str) -> list[str]:
    if node.options["pool"]:
        style = s.pick("average", "function", "reshape")
        if s.fault(node.site, "maximum for mean"):
            x = s.let(f"F.max_pool2d({x}, 2)")
        elif style == "function":
            x = s.let(f"F.avg_pool2d({x}, 2)")
        else:
            half = PIXELS // 2
            x = s.let(f"{x}.reshape([{BATCH}, {node.width}, {half}, 2, {half}, 2]).mean([3, 5])")
    # as many as sequences have
    x = s.let(f"{x}.flatten(2)[:, :, {int(s.fault(node.site, 'slice off by one'))}:][:, :, :{TIME}]")
    return [s.let(s.side.swap(x, 1, 2, 3))]


# The whole


def stem(s: Scope, tree: Tree) -> str:
    node, width = tree.stem, tree.stem.width
    if tree.world == "vectors":
        return dense(s, "net", "stem", "x", 3, width)
    if tree.world == "images":
        return convolve(s, "net", "x", 3, width, 3, 2, "stem")
    leaf = "net.stem"
    s.here(leaf)
    weight = vector(f"{leaf}.weight", WORDS, width)
    style = "module" if node.options["spectral"] else s.pick("embedding", "module", "module", "raw")
    if node.options["spectral"]:
        tensors = {"weight_orig": weight, "weight_u": vector(f"{leaf}.unit_u", WORDS)}
        tensors["weight_v"] = vector(f"{leaf}.unit_v", width)
        made = f"nn.utils.spectral_norm(nn.Embedding({WORDS}, {width}))"
        x = s.layer(leaf, "embed", made, tensors, "x")
    elif style == "module":
        x = s.layer(leaf, "embed", f"nn.Embedding({WORDS}, {width})", {"weight": weight}, "x")
        called = s.code[-1].split(" = ")[1][: -len("(x)")]
        s.tied = f"{called}[0].weight" if s.program.places[leaf][0].endswith(".0") else f"{called}.weight"
    else:
        s.tied = s.parameter("embedding", weight)
        x = s.let(f"F.embedding(x, {s.tied})" if s.chance(0.5, "function for rows") else f"{s.tied}[x]")
    if node.options["position"] == "learned":
        table = s.parameter("position", vector("net.position", 1, TIME, width))
        x = s.let(f"{x} + {table}")
    elif node.options["position"] == "table":
        angles = f"np.outer(np.arange({TIME}), 100.0 ** (-np.arange({width}) / {width}))"
        made = s.side.constant(f"np.sin({angles})", "float32")
        where = s.pick("table", "saved buffer", "unsaved buffer", "forward")
        table = made if where == "forward" else s.buffer("position", made, where == "saved buffer")
        factor = "0.5 * " if s.fault("net", "constant") else ""
        x = s.let(f"{x} + {factor}{table}")
    return x


@block()
def network(s: Scope, tree: Tree) -> list[str]:
    head, width = tree.head, tree.head.width
    x = batch_first(s, stem(s, tree))
    features, losses = s.chain(tree.blocks, x, tree.names)
    features = [batch_first(s, x) for x in (features if head.kind == "layers" else features[-1:])]
    x = features[-1]
    if head.kind == "layers":
        return [*heads(s, features, width), *losses]
    x = normalize(s, "net", head.options, x, width, 3, "norm")
    if head.kind == "tied":
        scale = "0.5" if not s.fault("net", "scale missing") else "1.0"
        if s.side.torch and s.pick("tied", "layer", "weight") == "layer":
            name = s.name("head")
            s.init.append(f"self.{name} = nn.Linear({width}, {WORDS}, bias=False)")
            s.last.append(f"self.{name}.weight = {s.tied}")
            s.program.tensors[f"{name}.weight"] = vector("net.stem.weight", WORDS, width)
            return [s.let(f"{scale} * self.{name}({x})"), *losses]
        return [s.let(f"{scale} * {x} @ {s.tied}.T"), *losses]
    if head.kind == "pool":
        x = pooled(s, "net", x)
    elif head.kind == "last":
        last = -2 if s.fault("net", "slice off by one") else -1
        x = s.let(f"{x}[:, {last}]")
    return [dense(s, "net", "head", x, width, 3), *losses]


def pooled(s: Scope, site: str, x: str) -> str:
    style = s.pick("pool", "mean", "sum")
    if s.fault(site, "sum for mean"):
        return s.let(f"{x}.sum(1)")
    if style == "mean":
        return s.let(f"{x}.mean(1)")
    return s.let(f"{x}.sum(1) / {TIME}")


def heads(s: Scope, features: Sequence[str], width: int) -> list[str]:
    """One for each block's output, in a list or apart."""
    if s.pick("heads", "list", "apart") == "apart":
        return [dense(s, f"net.heads{i}", "head", x, width, 3) for i, x in enumerate(features)]
    name, turned = s.name("heads"), not s.side.torch
    s.init.append(f"self.{name} = {s.side.list}([nn.Linear({width}, 3) for _ in range({len(features)})])")
    for i in range(len(features)):
        leaf, path = f"net.heads{i}.head", f"{name}.{i}"
        s.program.places[leaf], s.program.modules[leaf] = [path], path
        s.program.tensors[f"{path}.weight"] = Held(((f"{leaf}.weight", (3, width)),), turned)
        s.program.tensors[f"{path}.bias"] = vector(f"{leaf}.bias", 3)
    shift = s.fault("net", "heads in the wrong order") if len(features) > 1 else False
    features = features[::-1] if shift else features
    return [s.let(f"self.{name}[{i}]({x})") for i, x in enumerate(features)]
