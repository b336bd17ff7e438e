"""Draw the tutorial's pictures of the network, docs/images/*.svg, from the reference model and from real runs.

  python maintenance/pages/draw_network.py            runs an image through both sizes and draws what the model says
  python maintenance/pages/draw_network.py --check    says which of these pictures are not what the model says now
  python maintenance/pages/draw_network.py --runs     draws the pictures of runs of steps 01 and 07: some minutes

Shapes, channels, strides, kernels, activations, parameters and multiply-adds are read off the model with hooks, and
the curves are values of its own layers. Rounding differs from one machine to the next, so that pictures of runs are
drawn anew when somebody wants to, and not checked. Exits with 1 if a picture is stale.
"""

import argparse
import contextlib
import io
import math
import multiprocessing
import re
import runpy
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

from maintenance import DOCS, ROOT
from maintenance.checks.gallery import FAULTS, FLAGS, Fault, copy_port, import_port, load_faults
from maintenance.pages.generated import write_or_compare
from mobilenetv3_proof.step import ModelRung
from mobilenetv3_ref.models import MODELS, MobileNetV3
from mobilenetv3_ref.models.layers import AdaptiveAvgPool2d, Hardsigmoid
from mobilenetv3_ref.models.mobilenet_v3 import InvertedResidual, SqueezeExcitation
from portproof.report.plots import Plot, plots_of
from sturdyio.cli import ArgumentParser, HelpFormatter, run

NAME = "draw_network"
IMAGES = DOCS / "images"
SIZE = 224  # of the image, as in the paper's tables
SHORT = {nn.Hardswish: "HS", nn.ReLU: "RE"}  # as the paper's tables call them
BLOCK = "features.5"  # of the small model: it has a residual and squeeze-and-excite
FORWARD_FAULT = "hard-sigmoid with slope 0.1666667"

WIDTH, ROW, FONT = 390, 40, 12  # a phone's width, so that text keeps its size there
# The page's colours; behind each comma what a page without them shows, as GitHub's.
STYLE = (
    ".drawn .bg{fill:var(--md-default-bg-color,#fff)}"
    ".drawn text{fill:var(--md-default-fg-color,#263238)}"
    ".drawn .muted{fill:var(--md-default-fg-color--light,#546e7a)}"
    ".drawn .box{fill:var(--md-code-bg-color,#eceff1);stroke:#78909c;stroke-width:1.2}"
    ".drawn .hs{fill:#ff8a6566;stroke:#ff7043;stroke-width:1.2}"
    ".drawn .re{fill:#64b5f666;stroke:#42a5f5;stroke-width:1.2}"
    ".drawn .line{fill:none;stroke:#90a4ae;stroke-width:1.5}"
    ".drawn .thin{fill:none;stroke:#90a4ae;stroke-width:.7}"
    ".drawn .hard{fill:none;stroke:#ff7043;stroke-width:2.5}"
    ".drawn .soft{fill:none;stroke:#42a5f5;stroke-width:2;stroke-dasharray:6 4}"
    ".drawn .head{fill:#90a4ae}"
)


@dataclass(frozen=True)
class Call:
    """What one module did with the image."""

    name: str
    module: nn.Module
    taken: tuple[int, ...]  # shapes, without the batch
    given: tuple[int, ...]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def multiply_adds(self) -> int:
        """Of a convolution or a linear layer: each output value is a sum over one filter."""
        return math.prod(self.given) * self.module.weight[0].numel()


def calls_of(model: MobileNetV3) -> dict[str, Call]:
    """{name: what it did} of every module, in the order in which they end."""
    calls: dict[str, Call] = {}

    def hook(name: str) -> Callable:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls[name] = Call(name, module, tuple(inputs[0].shape[1:]), tuple(output.shape[1:]))

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, SIZE, SIZE))
    for handle in handles:
        handle.remove()
    return calls


def shape(extents: Sequence[int]) -> str:
    """112²×16 of (16, 112, 112); 576 of (576,)."""
    if len(extents) == 1:
        return str(extents[0])
    channels, height, width = extents
    return f"{height}²×{channels}" if height == width else f"{height}×{width}×{channels}"


def count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.1f} k" if number >= 1000 else str(number)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "", size: float = FONT) -> str:
    marks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    size_ = f' font-size="{size:g}"' if size != FONT else ""
    return f'<text x="{x:g}" y="{y:g}"{marks}{size_}>{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'


def arrow(x: float, top: float, bottom: float) -> str:
    """Downwards."""
    head = f"M{x - 4:g} {bottom - 6:g}H{x + 4:g}L{x:g} {bottom:g}Z"
    return f'<path class="line" d="M{x:g} {top:g}V{bottom - 6:g}"/><path class="head" d="{head}"/>'


def picture(title: str, height: float, parts: Sequence[str]) -> str:
    """The file: its own colours where a page has none, a background so that text is legible on any."""
    head = (
        f'<svg class="drawn" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="{FONT}">'
    )
    background = f'<rect class="bg" width="{WIDTH}" height="{height:g}" rx="6"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", background, *parts, "</svg>", ""])


def activation_of(module: nn.Module) -> str:
    """HS, RE, or "" of the first activation in it."""
    return next((SHORT[type(inner)] for inner in module.modules() if type(inner) in SHORT), "")


def convolutions(call: Call, calls: dict[str, Call]) -> list[Call]:
    """Those of a stage of `features` along its main path, in order; those of squeeze-and-excite are beside it."""
    inside = (one for name, one in calls.items() if name.startswith(f"{call.name}."))
    return [one for one in inside if isinstance(one.module, nn.Conv2d) and not re.search(r"\.fc\d$", one.name)]


def stage_words(call: Call, calls: dict[str, Call]) -> str:
    """Kernel, stride, squeeze-and-excite and activation, as a row of the paper's table has them."""
    spatial = max(convolutions(call, calls), key=lambda one: one.module.kernel_size)
    words = [f"{spatial.module.kernel_size[0]}×{spatial.module.kernel_size[1]}"]
    if spatial.module.stride[0] > 1:
        words.append(f"stride {spatial.module.stride[0]}")
    if any(isinstance(inner, SqueezeExcitation) for inner in call.module.modules()):
        words.append("SE")
    return ", ".join([*words, activation_of(call.module)])


def draw_stages(model: MobileNetV3, title: str) -> str:
    """The whole network from the image down to the logits: a row a block, as wide as it has channels."""
    calls = calls_of(model)
    stages = [calls[f"features.{i}"] for i in range(len(model.features))]
    rest = [call for call in calls.values() if isinstance(call.module, nn.Linear)]
    layers = [one for one in calls.values() if isinstance(one.module, nn.Conv2d | nn.Linear)]
    widest = max(one.given[0] for one in layers)
    middle, left, right, y = 125, 54, 196, 30.0

    def half(channels: int) -> float:
        return (channels / widest) ** 0.5 * (right - left) / 2

    def slab(x: int, channels: Sequence[int], top: float, kind: str) -> str:
        """An outline through the widths at equal distances."""
        ys = [top + (ROW - 8) * i / (len(channels) - 1) for i in range(len(channels))]
        points = [(x - half(c), at) for c, at in zip(channels, ys, strict=True)]
        points += [(x + half(c), at) for c, at in reversed(list(zip(channels, ys, strict=True)))]
        return f'<path class="{kind}" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in points)}Z"/>'

    parts = [text(8, 18, "resolution", "muted", size=11), text(middle, 18, "channels", "muted", "middle", 11)]
    parts.append(text(right + 8, 18, "input → expanded → output", "muted", size=11))
    resolution = 0
    for stage in stages:
        if stage.given[1] != resolution:
            resolution = stage.given[1]
            parts.append(f'<path class="thin" d="M8 {y - 2:g}H{WIDTH - 8}"/>')
            parts.append(text(8, y + 21, f"{resolution}²"))
        channels = [stage.taken[0], stage.given[0]]
        if isinstance(stage.module, InvertedResidual):
            channels.insert(1, max(one.given[0] for one in convolutions(stage, calls)))
        corners = [channels[0], channels[1], channels[1], channels[2]] if len(channels) == 3 else channels
        parts.append(slab(middle, corners, y + 2, activation_of(stage.module).lower()))
        if getattr(stage.module, "use_res_connect", False):
            x = middle - half(max(channels)) - 5
            parts.append(
                f'<path class="line" d="M{middle - half(channels[0]):.1f} {y + 2:g}H{x:.1f}V{y + ROW - 8:g}"/>'
            )
            parts.append(f'<path class="head" d="M{x - 4:.1f} {y + ROW - 12:g}h8l-4 6z"/>')
        parts.append(text(right + 8, y + 14, f"{stage.name}: {' → '.join(map(str, channels))}", size=11))
        parts.append(text(right + 8, y + 29, stage_words(stage, calls), "muted", size=11))
        y += ROW
    parts.append(f'<path class="thin" d="M8 {y - 2:g}H{WIDTH - 8}"/>')
    parts.append(text(8, y + 21, "pooled"))
    for call in rest:
        parts.append(slab(middle, [call.taken[0], call.given[0]], y + 2, "box"))
        parts.append(text(right + 8, y + 14, f"{call.name}: {call.taken[0]} → {call.given[0]}", size=11))
        parts.append(text(right + 8, y + 29, layer_words(call), "muted", size=11))
        y += ROW
    total = sum(parameter.numel() for parameter in model.parameters())
    adds = sum(one.multiply_adds for one in layers)
    parts.append(text(8, y + 18, f"{total:,} parameters, {adds / 1e6:.0f} million multiply-adds", "muted"))
    y += 30
    for kind, words in (("hs", "HS: hard-swish"), ("re", "RE: ReLU"), ("box", "linear")):
        x = {"hs": 8, "re": 130, "box": 225}[kind]
        parts += [box(x, y, 16, 12, kind), text(x + 22, y + 11, words, size=11)]
    parts.append(f'<path class="line" d="M318 {y:g}v8"/><path class="head" d="M314 {y + 6:g}h8l-4 6z"/>')
    parts.append(text(328, y + 11, "residual", size=11))
    return picture(title, y + 22, parts)


def layer_words(call: Call) -> str:
    """A layer as one says it."""
    module = call.module
    if isinstance(module, nn.Conv2d):
        depthwise = "depthwise " if module.groups > 1 else ""
        stride = f", stride {module.stride[0]}" if module.stride[0] > 1 else ""
        return f"{depthwise}convolution {module.kernel_size[0]}×{module.kernel_size[1]}{stride}"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, AdaptiveAvgPool2d):
        return "average over all places"
    if isinstance(module, nn.BatchNorm2d):
        return "batch norm"
    if isinstance(module, nn.Dropout):
        return f"dropout {module.p:g}"
    return {nn.Hardswish: "hard-swish", nn.ReLU: "ReLU", Hardsigmoid: "hard-sigmoid"}[type(module)]


def leaves(calls: dict[str, Call], prefix: str) -> list[Call]:
    """The layers below `prefix` that have none below them, in the order of computation."""
    return [one for name, one in calls.items() if name.startswith(prefix) and not list(one.module.children())]


def layer_box(call: Call, name: str, x: float, y: float, width: float) -> list[str]:
    """A layer with the arrow to it, 46 high in all."""
    words = f"{name} → {shape(call.given)}"
    return [
        arrow(x + width / 2, y, y + 12),
        box(x, y + 12, width, 34, SHORT.get(type(call.module), "box").lower()),
        text(x + width / 2, y + 26, layer_words(call), anchor="middle", size=11.5),
        text(x + width / 2, y + 40, words, "muted", "middle", 10.5 if len(words) < 32 else 9.5),
    ]


def draw_block(model: MobileNetV3, name: str, title: str) -> str:
    """One inverted residual block with a residual, layer by layer, and its branch of squeeze-and-excite."""
    calls = calls_of(model)
    block = calls[name]
    squeeze = next(one for one in calls.values() if one.name.startswith(name) and type(one.module) is SqueezeExcitation)
    layers = leaves(calls, f"{name}.")
    branch = leaves(calls, f"{squeeze.name}.")
    middle, width, beside, y = 140, 178, 294, 32.0
    begin = y
    parts = [text(middle, y - 8, f"input {shape(block.taken)}", anchor="middle")]

    def layer(call: Call, x: float) -> None:
        nonlocal y
        parts.extend(layer_box(call, call.name.removeprefix(f"{name}."), x - width / 2, y, width))
        y += 46

    first, last = layers.index(branch[0]), layers.index(branch[-1])
    for call in layers[:first]:
        layer(call, middle)
    fork = y + 8
    parts.append(f'<path class="line" d="M{middle} {fork:g}H{beside}"/>')
    y = fork
    for call in branch:
        layer(call, beside)
    at = y + 22  # each channel times its gate
    parts += [
        f'<path class="line" d="M{middle} {fork - 8:g}V{at - 11:g}M{beside} {y:g}V{at:g}H{middle + 17}"/>',
        f'<path class="head" d="M{middle + 17} {at - 4:g}v8l-6 -4z"/>',
        f'<circle class="box" cx="{middle}" cy="{at:g}" r="11"/>',
        text(middle, at + 4, "×", anchor="middle"),
        text(middle - 18, at + 4, shape(squeeze.given), "muted", "end", 10.5),
    ]
    y = at + 11
    for call in layers[last + 1 :]:
        layer(call, middle)
    at = y + 28
    parts += [
        arrow(middle, y, at - 11),
        f'<path class="line" d="M{middle} {begin:g}H22V{at:g}H{middle - 17}"/>',
        f'<path class="head" d="M{middle - 17} {at - 4:g}v8l6 -4z"/>',
        text(28, at - 8, "residual", "muted", size=11),
        f'<circle class="box" cx="{middle}" cy="{at:g}" r="11"/>',
        text(middle, at + 4, "+", anchor="middle"),
        arrow(middle, at + 11, at + 27),
        text(middle, at + 41, f"output {shape(block.given)}", anchor="middle"),
    ]
    return picture(title, at + 52, parts)


def draw_tail(model: MobileNetV3, title: str) -> str:
    """What stands behind the last block, with what each layer costs."""
    calls = calls_of(model)
    last = f"features.{len(model.features) - 1}."
    chain = [one for prefix in (last, "avgpool", "classifier.") for one in leaves(calls, prefix)]
    x, width, y = 10, 200, 12.0
    parts = [text(x + width / 2, y + 12, f"last block {shape(chain[0].taken)}", anchor="middle")]
    parts.append(text(300, y + 12, "parameters", "muted", "end", 10.5))
    parts.append(text(384, y + 12, "multiply-adds", "muted", "end", 10.5))
    y += 20
    for call in chain:
        parts += layer_box(call, call.name, x, y, width)
        if call.parameters:
            parts.append(text(300, y + 33, count(call.parameters), anchor="end"))
        if isinstance(call.module, nn.Conv2d | nn.Linear):
            parts.append(text(384, y + 33, count(call.multiply_adds), anchor="end"))
        y += 46
    return picture(title, y + 12, parts)


def draw_curves(title: str) -> str:
    """Hard-sigmoid and hard-swish, as the model's layers compute them, on the sigmoid and the swish they stand for."""
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    pairs = [
        ("hard-sigmoid", Hardsigmoid(), "sigmoid", nn.Sigmoid(), (-0.2, 1.2), (0, 1)),
        ("hard-swish", nn.Hardswish(), "swish", nn.SiLU(), (-1, 5), (0, 5)),
    ]
    parts, top, height = [], 34.0, 150.0
    for hard_name, hard, soft_name, soft, (low, high), ticks in pairs:

        def across(value: float) -> float:
            return 36 + (value + 5) / 10 * (WIDTH - 56)

        def down(value: float, top: float = top, low: float = low, high: float = high) -> float:
            return top + height - (value - low) / (high - low) * height

        parts += [
            f'<path class="hard" d="M12 {top - 14:g}h24"/>',
            text(42, top - 10, hard_name),
            f'<path class="soft" d="M142 {top - 14:g}h24"/>',
            text(172, top - 10, soft_name),
        ]
        for tick in ticks:
            parts.append(f'<path class="thin" d="M36 {down(tick):.1f}H{WIDTH - 20}"/>')
            parts.append(text(30, down(tick) + 4, str(tick), "muted", "end", 11))
        for tick in (-3, 0, 3):
            parts.append(f'<path class="thin" d="M{across(tick):.1f} {top:g}v{height:g}"/>')
            parts.append(text(across(tick), top + height + 15, str(tick).replace("-", "−"), "muted", "middle", 11))
        for kind, function in (("soft", soft), ("hard", hard)):
            values = zip(x.tolist(), function(x).tolist(), strict=True)
            points = "L".join(f"{across(a):.1f} {down(b):.1f}" for a, b in values)
            parts.append(f'<path class="{kind}" d="M{points}"/>')
        top += height + 54
    return picture(title, top - 30, parts)


def draw_all() -> dict[str, str]:
    """{file: picture} of everything that the model itself says."""
    large, small = MODELS["mobilenet_v3_large"](), MODELS["mobilenet_v3_small"]()
    return {
        "network_large.svg": draw_stages(large, "MobileNetV3-Large"),
        "network_small.svg": draw_stages(small, "MobileNetV3-Small"),
        "network_block.svg": draw_block(small, BLOCK, f"{BLOCK} of MobileNetV3-Small"),
        "network_tail.svg": draw_tail(small, "The tail of MobileNetV3-Small"),
        "network_curves.svg": draw_curves("The hard activations and what they stand for"),
    }


@dataclass(frozen=True)
class OfRun:
    """A plot that the report has of a step: which step, with which fault ("" for none), and which of its plots."""

    file: str
    step: str
    fault: str
    kind: str  # as `plots_of` has them
    title: str


OF_RUNS = [
    OfRun("run_error.svg", "01_test_forward", "", "depth", "eval mode, float64"),
    OfRun("run_error_fault.svg", "01_test_forward", FORWARD_FAULT, "depth", "eval mode, float64"),
    OfRun("run_loss.svg", "07_test_train", "", "curves", "seed 0, loss"),
    OfRun("run_top1.svg", "07_test_train", "", "curves", "seed 0, training top-1"),
]
PLOT_COLOURS = {
    "--muted": "--md-default-fg-color--light,#546e7a",
    "--line": "--md-default-fg-color--lightest,#cfd8dc",
    "--data": "--data,#0b62a8",
    "--limit": "--limit,#9aa4b1",
    "--fail": "--fail,#b23a06",
}


def run_step(step: str, fault: Fault | None) -> dict[str, list[Plot]]:
    """The plots of a step of the project, run on the port with the fault; in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        copy_port(Path(folder), fault)
        import_port(Path(folder))
        return plots_of(outcome_of(step))


def outcome_of(step: str) -> ModelRung:
    """What the step leaves when it is run without a word."""
    script = runpy.run_path(str(ROOT / "steps" / f"{step}.py"))
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        flags = ["--output-dir", out, *FLAGS.get(step, [])]
        return script["main"](script["get_args_parser"]().parse_args(flags))


def standing_alone(plot: Plot) -> str:
    """A plot of the report as a file of its own, with the colours of the tutorial's pages."""
    svg = plot.svg
    for own, page in PLOT_COLOURS.items():
        svg = svg.replace(f"var({own})", f"var({page})")
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
    svg = svg.replace("<svg", '<svg class="drawn" font-family="system-ui, sans-serif"', 1)
    background = f'<rect width="{width}" height="{height}" rx="6" style="fill: var(--md-default-bg-color,#fff)"/>'
    begin = svg.index(">") + 1
    return f"{svg[:begin]}\n<title>{escape(plot.title)}</title>\n{background}{svg[begin:]}\n"


def draw_runs() -> dict[str, str]:
    """{file: picture} of what steps 01 and 07 drew for the report, on the port and with a fault in it."""
    faults = {fault.name: fault for fault in load_faults(FAULTS)}
    pictures = {}
    for step, fault in dict.fromkeys((one.step, one.fault) for one in OF_RUNS):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            plots = process.submit(run_step, step, faults.get(fault)).result()
        for one in OF_RUNS:
            if (one.step, one.fault) == (step, fault):
                (plot,) = (plot for plot in plots[one.kind] if plot.title == one.title)
                pictures[one.file] = standing_alone(plot)
    return pictures


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="write nothing, compare")
    either.add_argument("--runs", action="store_true", help="run steps and draw what they measured")
    return parser


def main(args: argparse.Namespace) -> int:
    pictures = draw_runs() if args.runs else draw_all()
    return write_or_compare(IMAGES, pictures, "docs/images", args.check)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
