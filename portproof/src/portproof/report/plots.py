"""The plots of the report, as SVG, and input images that differ, as PNG data URIs.

The page sets the plots' colours, light or dark. No user text gets into one: Matplotlib reads `$` as mathematics. `_`
translates: a plot's texts when it is drawn, for Matplotlib's fonts have no Chinese characters.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike
from PIL import Image

from portproof.compare import PASS, Row
from portproof.report.summary import Findings

Translation = Callable[[str], str]

WIDTH, HEIGHT = 440, 220  # points; legible on a phone
FEWEST = 8
# The page's colours, by placeholders that no plot uses.
VARIABLES = {
    "#010203": "--muted",
    "#020304": "--line",
    "#030405": "--data",
    "#040506": "--limit",
    "#050607": "--fail",
}
INK, GRID, DATA, LIMIT, BAD = VARIABLES
# The axis label, by how a curve's name ends.
CURVES = {"lr": "learning rate", "loss": "loss", "training top-1": "top-1 in training", "top-1": "top-1 in evaluation"}
CROSS: dict[str, Any] = {"color": BAD, "markersize": 5.5, "markeredgewidth": 0}
# By kind of item: Matplotlib's line style, the dashes in the page's legend.
STYLES = {"loss": ("-", ""), "gradient": ("--", "6 3"), "parameter": (":", "2 2"), "buffer": ("-.", "6 2 2 2")}
RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # real text, for selection and screen readers
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.6),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "grid.color": GRID,
}
MEAN = np.array([0.485, 0.456, 0.406])  # of images, in both sides' presets
STD = np.array([0.229, 0.224, 0.225])
COLORMAP = "viridis"  # of their difference; readable with any colour vision


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str
    text: str = ""


def _drawable(values: ArrayLike) -> np.ndarray:
    """As float64; NaN where infinite. Matplotlib fails near the ends of float64."""
    array = np.array(values, np.float64)
    array[np.isinf(array)] = np.nan
    return np.sign(array) * np.clip(np.abs(array), 0, 1e300) * (np.abs(array) >= 1e-300)


def _to_svg(axes: Axes, label: str, salt: str, _: Translation) -> str:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        cast(Figure, axes.figure).savefig(text, format="svg", transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    used = set(re.findall(r"#([\w.-]+)", svg))  # others repeat in every plot
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    svg = re.sub(r"\s+", " ", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # hundredths of a point are enough
    svg = re.sub(r">([^<>]+)</text>", lambda match: f">{html.escape(_(html.unescape(match[1].strip())))}</text>", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(_(label))}"', 1)


def _axes(x_label: str, y_label: str, log: bool = False) -> Axes:
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    axes = figure.add_axes((0.135, 0.185, 0.85, 0.73))  # a fitted layout is drawn twice
    axes.set_xlabel(x_label)
    axes.set_title(y_label, loc="left", fontsize=10, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    return axes


def _mark_bad(axes: Axes, x: np.ndarray, heights: np.ndarray, bad: np.ndarray) -> None:
    with_height = bad & (heights > 0)
    axes.plot(x[with_height], heights[with_height], "X", **CROSS)
    _mark_edge(axes, x[bad & ~with_height], 0.97, "X", **CROSS)


def _mark_edge(axes: Axes, x: np.ndarray, height: float, mark: str, **style: Any) -> None:
    axes.plot(x, np.full(len(x), height), mark, **style, transform=axes.get_xaxis_transform())


def depth_rows(rows: Sequence[Row]) -> list[Row]:
    """The first iteration's gradients, else modules; without what passed with limit 0."""
    rows = [row for row in rows if row.atol != 0 or row.status != PASS]
    gradients = [row for row in rows if row.item.kind == "gradient" and not row.item.iteration]
    return gradients or [row for row in rows if row.item.kind in ("output", "buffer")]


@matplotlib.rc_context(RC)
def depth_plot(title: str, rows: Sequence[Row], salt: str, _: Translation = str) -> Plot:
    """Difference and limit of each row on a log scale; a tick at the lower edge is 0."""
    x_label = "item, in the order of execution"
    if rows[0].item.kind == "gradient":
        x_label = "gradient, from the output to the input"
        if rows[0].item.iteration is not None:
            title = _("{}: gradients of iteration 0").format(title)
    difference = _drawable([row.difference for row in rows])
    limit = _drawable([row.atol for row in rows])
    bad = np.array([row.status != PASS for row in rows])
    x = np.arange(1, len(rows) + 1)
    axes = _axes(x_label, "largest difference", log=True)
    axes.plot(x, np.where(limit > 0, limit, np.nan), color=LIMIT, linewidth=1.4, drawstyle="steps-mid")
    good = (difference > 0) & ~bad
    axes.plot(x[good], difference[good], "o", color=DATA, markersize=2.6)
    _mark_edge(axes, x[(difference == 0) & ~bad], 0.015, "|", color=DATA, markersize=4)
    _mark_bad(axes, x, difference, bad)
    statistics = [i for i, row in enumerate(rows) if row.item.kind == "buffer"]
    if statistics and statistics[0] > 0:
        axes.axvline(statistics[0] + 0.5, color=INK, linewidth=0.6, linestyle=":")
        edge = axes.get_xaxis_transform()
        axes.text(statistics[0] + 2, 0.93, "running statistics", transform=edge, fontsize=9)
    axes.set_xlim(0, len(rows) + 1)
    text = ""
    if bad.any():
        first = int(bad.argmax())
        over = _("{} of {} over the limit, first no. {}: {}")
        text = over.format(bad.sum(), len(rows), first + 1, rows[first].name)
    return Plot(title, _to_svg(axes, "Difference and limit of each item, in order", salt, _), text)


def shares(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """{kind: largest share of a limit, by iteration}; inf: no difference, NaN: no row."""
    rows = [row for row in rows if row.item.iteration is not None and (row.atol > 0 or row.status != PASS)]
    curves = {}
    for kind in STYLES:
        of_kind = [(row, row.item.iteration or 0) for row in rows if row.item.kind == kind]
        if of_kind:
            curves[kind] = np.full(1 + max(iteration for _, iteration in of_kind), np.nan)
        for row, iteration in of_kind:
            share = row.share if row.atol > 0 and row.difference >= 0 else np.inf
            curves[kind][iteration] = np.fmax(curves[kind][iteration], share)
    return curves


@matplotlib.rc_context(RC)
def shares_plot(title: str, curves: dict[str, np.ndarray], salt: str, _: Translation = str) -> Plot:
    axes = _axes("iteration", "largest difference / limit", log=True)
    axes.axhline(1, color=LIMIT, linewidth=1.4)
    over: set[int] = set()
    for kind, share in curves.items():
        x, drawn = np.arange(len(share)), _drawable(share)
        axes.plot(x, np.where(drawn > 0, drawn, np.nan), STYLES[kind][0], color=DATA, linewidth=1.3)
        _mark_bad(axes, x, drawn, share > 1)
        over.update(x[share > 1])
    text = _("over the limit at iteration {}").format(", ".join(map(str, sorted(over)))) if over else ""
    return Plot(title, _to_svg(axes, "Largest share of the limit at each iteration", salt, _), text)


@matplotlib.rc_context(RC)
def curve_plot(name: str, ref: ArrayLike, port: ArrayLike, salt: str, _: Translation = str) -> Plot:
    """One number an iteration, or an epoch where `ref` is (runs, n): their mean and range."""
    ref = _drawable(ref)
    x_label = "epoch" if ref.ndim == 2 else "iteration"
    what = CURVES.get(name.rpartition(", ")[2], "value")
    axes = _axes(x_label, what)
    if ref.ndim == 2:
        lowest, highest = ref.min(axis=0), ref.max(axis=0)
        axes.fill_between(np.arange(ref.shape[1]), lowest, highest, color=LIMIT, alpha=0.4, linewidth=0)
        axes.plot(ref.mean(axis=0), color=LIMIT, linewidth=1.4)
    else:
        axes.plot(ref, color=LIMIT, linewidth=4, solid_capstyle="round")
    axes.plot(_drawable(port), "o--", color=DATA, linewidth=1.3, markersize=3)
    label = _(f"{{}} of both sides at each {x_label}").format(_(what))
    return Plot(name, _to_svg(axes, label, salt, _))


def plots_of(rung: Findings, salt: str, _: Translation = str) -> dict[str, list[Plot]]:
    """{"depth", "shares" or "curves": plots}; a `salt` for each rung keeps ids unique."""
    plots: dict[str, list[Plot]] = {"depth": [], "shares": [], "curves": []}
    for i, verdict in enumerate(rung.verdicts):
        rows = depth_rows(verdict.judged)
        if len(rows) >= FEWEST:
            plots["depth"].append(depth_plot(verdict.title, rows, f"{salt}-depth-{i}", _))
        if curves := shares(verdict.judged):
            plots["shares"].append(shares_plot(verdict.title, curves, f"{salt}-shares-{i}", _))
    for i, (name, (ref, port)) in enumerate(rung.curves.items()):
        plots["curves"].append(curve_plot(name, ref, port, f"{salt}-curve-{i}", _))
    return plots


@dataclass(frozen=True)
class Picture:
    """An image and its text; uri is "" if it cannot be shown."""

    title: str
    uri: str
    text: str


def _data_uri(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _is_image(array: np.ndarray) -> bool:
    return array.ndim == 3 and array.size > 0 and array.dtype.kind in "iuf"


def _side(title: str, array: np.ndarray, _: Translation) -> Picture:
    """(3, H, W), or (H, W, 3) by mistake, without the normalization."""
    shape = "x".join(map(str, array.shape))
    if not _is_image(array) or 3 not in (array.shape[0], array.shape[2]):
        return Picture(title, "", _("no picture: {}").format(f"{array.dtype}, {shape}"))
    colours = array.astype(np.float64)
    if array.shape[0] == 3:
        colours = colours.transpose(1, 2, 0)
    text = _("{}, values {:.4g} to {:.4g}").format(shape, colours.min(), colours.max())
    if array.dtype.kind == "f":
        colours = (colours * STD + MEAN) * 255
    pixels = np.clip(np.nan_to_num(colours, nan=0.0), 0, 255).round().astype(np.uint8)
    return Picture(title, _data_uri(Image.fromarray(pixels)), text)


def _difference(ref: np.ndarray, port: np.ndarray, _: Translation) -> Picture:
    """The largest of each pixel's channels; brighter is larger."""
    title = _("difference")
    if not (_is_image(ref) and _is_image(port) and ref.shape == port.shape):
        sides = f"{ref.dtype} {ref.shape}, {port.dtype} {port.shape}"
        return Picture(title, "", _("no picture: {}").format(sides))
    error = np.abs(ref.astype(np.float64) - port.astype(np.float64)).max(axis=0)
    finite = error[np.isfinite(error)]
    largest = float(finite.max(initial=0))
    share = np.nan_to_num(error / largest if largest > 0 else error, nan=1.0, posinf=1.0)
    image = Image.fromarray((np.clip(share, 0, 1) * 255).round().astype(np.uint8), "L").convert("P")
    colours = matplotlib.colormaps[COLORMAP](np.arange(256), bytes=True)[:, :3]
    image.putpalette(colours.tobytes())
    bad = int((error != 0).sum())
    text = _("{} of {} pixels differ, by up to {:.4g}").format(bad, error.size, largest)
    return Picture(title, _data_uri(image), text)


def picture_row(ref: np.ndarray, port: np.ndarray, _: Translation = str) -> list[Picture]:
    """Both images and their difference; any shape and dtype."""
    return [_side(_("reference"), ref, _), _side(_("port"), port, _), _difference(ref, port, _)]
