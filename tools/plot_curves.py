"""Draw the loss, the top-1 accuracy and the learning rate of one or several training runs into one picture.

  python tools/plot_curves.py curves.png output_ref output_paddle

Each run is a folder with a metrics.jsonl, as the training commands of both frameworks write it, and is called by the
folder's name. The first is drawn widest and below the others, so that runs that agree are seen to lie on one another.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mobilenetv3_common.metrics import NAME, read_metrics
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run
from sturdyio.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROG = "plot_curves"
SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which people who see no red or no green can tell apart.
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
STYLES = {"train": "-", "eval": "-", "eval_ema": "--"}
TITLES = {
    ("train", "loss"): "training: loss",
    ("train", "top1"): "training: top-1 accuracy, %",
    ("train", "lr"): "learning rate",
    ("eval", "loss"): "validation: loss",
    ("eval", "top1"): "validation: top-1 accuracy, %",
}
MOST_POINTS = 200  # of a curve; more are averaged in groups
INK, GRID = "#444444", "#e4e4e4"


@dataclass
class Run:
    """One training run: its label and, of each kind of record, {name: values} beside {"epochs": how far it was}."""

    label: str
    curves: dict[str, dict[str, np.ndarray]]


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("output", metavar="OUT", type=Path, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="output folder of a training run")
    return parser


def read_run(folder: Path, label: str) -> Run:
    """The run whose output is in `folder`; raises UserError when no epoch of it has been evaluated."""
    records = read_metrics(folder / NAME)
    evaluations = [record for record in records if record["kind"] == "eval"]
    if not evaluations:
        raise UserError(f"{folder / NAME} has no evaluation yet: wait for the end of the first epoch")
    steps_per_epoch = evaluations[-1]["step"] / (evaluations[-1]["epoch"] + 1)
    kinds = {kind: [record for record in records if record["kind"] == kind] for kind in STYLES}
    return Run(label, {kind: columns(found, steps_per_epoch) for kind, found in kinds.items() if found})


def columns(records: Sequence[dict[str, Any]], steps_per_epoch: float) -> dict[str, np.ndarray]:
    """What the plots need of records of one kind, float64; NaN where a record lacks it."""
    table = {
        name: np.array([record.get(name) for record in records], np.float64)  # None becomes NaN
        for name in ("loss", "top1", "lr")
    }
    return {"epochs": np.array([record["step"] for record in records]) / steps_per_epoch, **table}


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Their last parts, or the whole paths where these are the same."""
    names = [folder.resolve().name for folder in folders]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(folders, names, strict=True)]


def thinned(values: np.ndarray) -> np.ndarray:
    """The means of at most `MOST_POINTS` groups of neighbours."""
    return np.array([group.mean() for group in np.array_split(values, min(MOST_POINTS, len(values)))])


def draw_run(panels: "dict[tuple[str, str], Axes]", run: Run, colour: str, width: float) -> None:
    """All curves of one run, those of averaged weights dashed beside those of the weights themselves."""
    for kind, table in run.curves.items():
        for (where, name), axes in panels.items():
            if where == kind.removesuffix("_ema"):
                x, y = thinned(table["epochs"]), thinned(table[name]) * (100 if name == "top1" else 1)
                marker = "o" if len(x) <= 30 else None
                line = {"color": colour, "linewidth": width, "marker": marker, "markersize": width + 2}
                axes.plot(x, y, STYLES[kind], drawstyle="steps-pre" if name == "lr" else None, **line)


def draw(runs: Sequence[Run]) -> "Figure":
    """Training above, validation below it, and in the sixth place what colours and dashes mean."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(13, 7), dpi=120)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    grid = figure.subplots(2, 3, sharex=True)
    panels = dict(zip(TITLES, grid.flat, strict=False))
    for place, axes in panels.items():
        prepare(axes, TITLES[place])
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
    widths = np.linspace(4.5, 1.5, len(runs)) if len(runs) > 1 else [2.0]
    marks = []
    for one, colour, width in zip(runs, colours, widths, strict=True):
        draw_run(panels, one, colour, float(width))
        # A dollar sign would begin a formula, and a label that begins with an underscore be left out.
        marks.append(Line2D([], [], color=colour, linewidth=width, label=" " + one.label.replace("$", r"\$")))
    if any("eval_ema" in one.curves for one in runs):
        marks.append(Line2D([], [], color=INK, linestyle=STYLES["eval_ema"], label=" averaged weights"))
    grid[1, 2].set_axis_off()
    grid[1, 2].legend(handles=marks, loc="center left", frameon=False, fontsize="large", labelcolor=INK)
    return figure


def prepare(axes: "Axes", title: str) -> None:
    """A quiet frame for curves by epoch."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel("epoch", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelbottom=True)


def main(args: argparse.Namespace) -> None:
    if args.output.suffix not in SUFFIXES:
        raise UserError(f"output {args.output} ends in none of {', '.join(SUFFIXES)}: choose one of these suffixes")
    runs = [read_run(folder, label) for folder, label in zip(args.runs, labels_of(args.runs), strict=True)]
    try:
        figure = draw(runs)
    except ImportError as error:
        raise UserError(f"Matplotlib is needed ({error}): pip install -e '.[align]'") from error
    with atomic_path(args.output) as temporary:
        figure.savefig(temporary)
    print(f"wrote {args.output}: the curves of {len(runs)} run(s)")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
