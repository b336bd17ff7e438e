"""The plots of the report, as SVG, and input images that differ, as PNG data URIs.

The page sets the plots' colours, light or dark. Data are drawn in tenths of a pixel, each point from the one before: a
page has ten thousand of them. `_` translates.
"""

import base64
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from portproof.compare import PASS, Row
from portproof.report.summary import Findings

Translation = Callable[[str], str]

WIDTH, HEIGHT = 440, 220  # pixels; legible on a phone
LEFT, TOP, ACROSS, DOWN = 60, 18, 374, 160  # the part in which data are drawn: where it is, its width and height
MOST_TICKS = 6
FEWEST = 8
INK, GRID, DATA, LIMIT, BAD = "--muted", "--line", "--data", "--limit", "--fail"  # the page's colours
# The axis label, by how a curve's name ends.
CURVES = {"lr": "learning rate", "loss": "loss", "training top-1": "top-1 in training", "top-1": "top-1 in evaluation"}
# By kind of item: the dashes of its line, in pixels.
STYLES = {"loss": "", "gradient": "6 3", "parameter": "2 2", "buffer": "6 2 2 2"}
# What is drawn at a point, in tenths of a pixel; the pen comes back to where it was.
DOT, TICK, CROSS = "h0", "v60m0-60", "m-30-30l60 60m0-60l-60 60m30-30"
MEAN = np.array([0.485, 0.456, 0.406])  # of images, in both sides' presets
STD = np.array([0.229, 0.224, 0.225])


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str
    text: str = ""


@dataclass(frozen=True)
class _Scale:
    """Values from `low` to `high`, or their decimal logarithms, on `length` pixels."""

    low: float
    high: float
    length: int
    log: bool = False

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """In tenths of a pixel."""
        plain = np.log10(values) if self.log else np.asarray(values, np.float64)
        return np.round((plain - self.low) / (self.high - self.low) * 10 * self.length)

    def ticks(self, whole: bool = False) -> list[float]:
        """At most MOST_TICKS + 1 round numbers, of logarithms whole ones."""
        rough = (self.high - self.low) / MOST_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        step = max(step, 1.0) if whole or self.log else step
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _heights(*values: np.ndarray, log: bool = False) -> _Scale:
    """A scale of all that is finite, with some room at both ends; of a logarithmic one all above 0."""
    every = np.concatenate([array.ravel() for array in values])
    every = every[np.isfinite(every) & ((every > 0) | (not log))]
    every = np.log10(every) if log else every
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return _Scale(low - room, high + room, DOWN, log)


def _drawable(values: ArrayLike) -> np.ndarray:
    """As float64; NaN where infinite. Sums of numbers near the ends of float64 would overflow."""
    array = np.array(values, np.float64)
    array[np.isinf(array)] = np.nan
    return np.sign(array) * np.clip(np.abs(array), 0, 1e300) * (np.abs(array) >= 1e-300)


def _pair(x: float, y: float) -> str:
    return f"{x:.0f} {y:.0f}".replace(" -", "-")


def _marks(x: np.ndarray, y: np.ndarray, mark: str) -> str:
    """The path of a mark at each point."""
    moves = zip(np.diff(x, prepend=0.0), np.diff(y, prepend=0.0))
    return "".join(f"m{_pair(*move)}{mark}" for move in moves)


def _line(x: np.ndarray, y: np.ndarray) -> str:
    """The path through all points, with a gap where one is NaN."""
    parts: list[str] = []
    at = None
    for point in zip(x, y):
        if np.isnan(point[1]):
            at = None
            continue
        parts.append(f"M{_pair(*point)}" if at is None else f"l{_pair(point[0] - at[0], point[1] - at[1])}")
        at = point
    return "".join(parts)


def _path(d: str, colour: str, width: float, more: str = "") -> str:
    """A path in tenths of a pixel, `width` in pixels; "" for none."""
    return f'<path d="{d}" stroke="var({colour})" stroke-width="{10 * width:.0f}"{more}/>' if d else ""


def _dashed(dashes: str) -> str:
    """Dashes in pixels, which have square ends."""
    tenths = " ".join(f"{dash}0" for dash in dashes.split())
    return f' stroke-dasharray="{tenths}" stroke-linecap="butt"' if dashes else ""


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{html.escape(words)}</text>'


@dataclass(frozen=True)
class _Axes:
    x: _Scale
    y: _Scale
    x_label: str
    y_label: str

    def svg(self, label: str, paths: Sequence[str], _: Translation, more: str = "") -> str:
        """The plot of these paths; `more` is drawn in pixels."""
        bottom, ys = TOP + DOWN, self.y.ticks()
        lines = "".join(f"M{LEFT} {bottom - height / 10:.0f}h{ACROSS}" for height in map(self._height, ys))
        below = [
            _text(LEFT + float(self.x(tick)) / 10, bottom + 14, f"{tick:.0f}") for tick in self.x.ticks(whole=True)
        ]
        beside = [_text(LEFT - 7, bottom + 4 - self._height(tick) / 10, self._number(tick)) for tick in ys]
        return "".join(
            [
                f'<svg role="img" aria-label="{html.escape(_(label))}" viewBox="0 0 {WIDTH} {HEIGHT}"',
                ' xmlns="http://www.w3.org/2000/svg"><g fill="none" stroke-linecap="round">',
                f'<path d="{lines}" stroke="var({GRID})" stroke-width=".6"/>',
                f'<path d="M{LEFT} {TOP}v{DOWN}h{ACROSS}" stroke="var({INK})" stroke-width=".6"/>',
                f'<g transform="translate({LEFT} {bottom}) scale(.1 -.1)">{"".join(paths)}</g></g>',
                f'<g font-size="10" fill="var({INK})">{_text(LEFT, TOP - 7, _(self.y_label))}{more}',
                f'<g text-anchor="end">{"".join(beside)}</g><g text-anchor="middle">{"".join(below)}',
                f"{_text(LEFT + ACROSS / 2, HEIGHT - 12, _(self.x_label))}</g></g></svg>",
            ]
        )

    def _height(self, tick: float) -> float:
        return float(self.y(10.0**tick if self.y.log else tick))

    def _number(self, tick: float) -> str:
        return f"1e{tick:+03.0f}" if self.y.log else f"{tick:.6g}"


def _bad_marks(x: np.ndarray, heights: np.ndarray, bad: np.ndarray) -> str:
    """The path of a cross for each that is bad; those without a height are at the upper edge."""
    shown = np.where(np.isnan(heights), 9.7 * DOWN, heights)
    return _path(_marks(x[bad], shown[bad], CROSS), BAD, 2.5)


def depth_rows(rows: Sequence[Row]) -> list[Row]:
    """The first iteration's gradients, else modules; without what passed with limit 0."""
    rows = [row for row in rows if row.atol != 0 or row.status != PASS]
    gradients = [row for row in rows if row.item.kind == "gradient" and not row.item.iteration]
    return gradients or [row for row in rows if row.item.kind in ("output", "buffer")]


def depth_plot(title: str, rows: Sequence[Row], _: Translation = str) -> Plot:
    """Difference and limit of each row on a log scale; a tick at the lower edge is 0."""
    x_label = "item, in the order of execution"
    if rows[0].item.kind == "gradient":
        x_label = "gradient, from the output to the input"
        if rows[0].item.iteration is not None:
            title = _("{}: gradients of iteration 0").format(title)
    difference = _drawable([row.difference for row in rows])
    limit = _drawable([row.limit for row in rows])
    bad = np.array([row.status != PASS for row in rows])
    axes = _Axes(_Scale(0, len(rows) + 1, ACROSS), _heights(difference, limit, log=True), x_label, "largest difference")
    x = axes.x(np.arange(1, len(rows) + 1))
    limits, heights = (axes.y(np.where(values > 0, values, np.nan)) for values in (limit, difference))
    good, equal = (heights >= 0) & ~bad, (difference == 0) & ~bad
    paths = [
        _path(_line(x, limits), LIMIT, 1.4),
        _path(_marks(x[good], heights[good], DOT), DATA, 4),
        _path(_marks(x[equal], np.zeros(equal.sum()), TICK), DATA, 1),
        _bad_marks(x, heights, bad),
    ]
    more = ""
    statistics = [i for i, row in enumerate(rows) if row.item.kind == "buffer"]
    if statistics and statistics[0] > 0:
        border = axes.x(statistics[0] + 0.5)
        paths.append(_path(f"M{border:.0f} 0v{10 * DOWN}", INK, 0.6, _dashed("1 2")))
        more = _text(LEFT + float(border) / 10 + 4, TOP + 8, _("running statistics"))
    text = ""
    if bad.any():
        first = int(bad.argmax())
        over = _("{} of {} over the limit, first no. {}: {}")
        text = over.format(bad.sum(), len(rows), first + 1, rows[first].name)
    return Plot(title, axes.svg("Difference and limit of each item, in order", paths, _, more), text)


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


def shares_plot(title: str, curves: dict[str, np.ndarray], _: Translation = str) -> Plot:
    drawn = {kind: _drawable(share) for kind, share in curves.items()}
    last = max(map(len, curves.values())) - 1
    axes = _Axes(
        _Scale(0, max(last, 1), ACROSS),
        _heights(np.ones(1), *drawn.values(), log=True),
        "iteration",
        "largest difference / limit",
    )
    paths = [_path(f"M0 {axes.y(1.0):.0f}h{10 * ACROSS}", LIMIT, 1.4)]
    over: set[int] = set()
    for kind, share in curves.items():
        numbers = np.arange(len(share))
        x, y = axes.x(numbers), axes.y(np.where(drawn[kind] > 0, drawn[kind], np.nan))
        paths += [_path(_line(x, y), DATA, 1.3, _dashed(STYLES[kind])), _bad_marks(x, y, share > 1)]
        over.update(numbers[share > 1])
    text = _("over the limit at iteration {}").format(", ".join(map(str, sorted(over)))) if over else ""
    return Plot(title, axes.svg("Largest share of the limit at each iteration", paths, _), text)


def curve_plot(name: str, ref: ArrayLike, port: ArrayLike, _: Translation = str) -> Plot:
    """One number an iteration, or an epoch where `ref` is (runs, n): their mean and range."""
    ref, port = _drawable(ref), _drawable(port)
    x_label = "epoch" if ref.ndim == 2 else "iteration"
    what = CURVES.get(name.rpartition(", ")[2], "value")
    length = max(ref.shape[-1], len(port))
    axes = _Axes(_Scale(0, max(length - 1, 1), ACROSS), _heights(ref, port), x_label, what)
    x = axes.x(np.arange(length))
    mean = ref.mean(axis=0) if ref.ndim == 2 else ref
    paths = [_path(_line(x, axes.y(mean)), LIMIT, 1.4 if ref.ndim == 2 else 4)]
    if ref.ndim == 2:
        around = np.concatenate([axes.y(ref.min(axis=0)), axes.y(ref.max(axis=0))[::-1]])
        band = _line(np.concatenate([x, x[::-1]]), around)
        paths.append(f'<path d="{band}" fill="var({LIMIT})" fill-opacity=".4"/>')
    heights = axes.y(port)
    drawn = np.isfinite(heights)
    paths.append(_path(_line(x, heights), DATA, 1.3, _dashed("5 3")))
    paths.append(_path(_marks(x[: len(port)][drawn], heights[drawn], DOT), DATA, 4))
    label = _(f"{{}} of both sides at each {x_label}").format(_(what))
    return Plot(name, axes.svg(label, paths, _))


def plots_of(rung: Findings, _: Translation = str) -> dict[str, list[Plot]]:
    """{"depth", "shares" or "curves": plots}."""
    plots: dict[str, list[Plot]] = {"depth": [], "shares": [], "curves": []}
    for verdict in rung.verdicts:
        rows = depth_rows(verdict.judged)
        if len(rows) >= FEWEST:
            plots["depth"].append(depth_plot(verdict.title, rows, _))
        if curves := shares(verdict.judged):
            plots["shares"].append(shares_plot(verdict.title, curves, _))
    for name, (ref, port) in rung.curves.items():
        plots["curves"].append(curve_plot(name, ref, port, _))
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
    image = Image.fromarray((np.clip(share, 0, 1) * 255).round().astype(np.uint8))
    bad = int((error != 0).sum())
    text = _("{} of {} pixels differ, by up to {:.4g}").format(bad, error.size, largest)
    return Picture(title, _data_uri(image), text)


def picture_row(ref: np.ndarray, port: np.ndarray, _: Translation = str) -> list[Picture]:
    """Both images and their difference; any shape and dtype."""
    return [_side(_("reference"), ref, _), _side(_("port"), port, _), _difference(ref, port, _)]
