"""A verdict as text: a table of groups, then the first failing item and its usual causes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix

from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Row, Verdict

LAST_WORDS = {PASS: "PASS", FAIL: "FAIL", REFUSED: "REFUSED", NOT_JUDGED: "NOT JUDGED"}
WORDS = {PASS: "ok", FAIL: "FAIL", REFUSED: "REFUSED", NOT_JUDGED: "-"}
ORDER = (NOT_JUDGED, PASS, REFUSED, FAIL)  # the worst last
# Usual causes, by layer type, statistic or kind of item. A rung may have its own: `compare(..., hints=)`.
CAUSES = {
    "output": "the classifier, or a function between modules (flatten, residual)",  # of the whole model
    "Conv2d": "stride, padding, dilation or groups; a weight that was not loaded or was loaded into another layer",
    "BatchNorm2d": "epsilon; running statistics not loaded (running_mean is _mean in Paddle); train for eval mode",
    "Linear": "weight not transposed (Paddle keeps it as in_features x out_features); bias missing",
    "ReLU": "another activation (ReLU6, hard-swish)",
    "Hardswish": "another activation (swish, ReLU); hard-swish with other constants",
    "Hardsigmoid": "slope (Paddle's default is 0.1666667, not 1/6) or offset; sigmoid in its place",
    "AdaptiveAvgPool2d": "max for average pooling; a pool over the wrong axes",
    "AvgPool2d": "whether padding counts in the mean (Paddle's exclusive=True leaves it out); ceil_mode",
    "MaxPool2d": "padding, ceil_mode",
    "Dropout": "active in eval mode; outputs scaled at another time (Paddle's downscale_in_infer)",
    "SqueezeExcitation": "the gate added instead of multiplied, or applied to another tensor",
    "InvertedResidual": "the residual connection missing, or present where channels or stride change",
    "Conv2dNormActivation": "order of convolution, normalization and activation",
    "buffer running_mean": "batch-norm momentum: Paddle's is the share of the OLD value, 1 - PyTorch's",
    "buffer running_var": "biased instead of unbiased batch variance (factor n / (n - 1)); batch-norm momentum "
    "convention",
    "buffer num_batches_tracked": "batch norm in eval mode, or statistics not updated",
    "structure": "a layer missing, added or of another size; another width, kernel or number of classes",
    "dropout": "dropout probability, or its mode (Paddle: upscale_in_train)",
    "lr": "the schedule is not attached to the optimizer, not stepped, or stepped at another time; gamma",
    "gradient": "an operation whose backward differs; a gradient not cleared, or scaled by the batch",
    "parameter": "optimizer formula: epsilon, weight decay, momentum, nesterov, learning rate of one group; clipping "
    "by parameter group (Paddle's ClipGradByGlobalNorm clips each group by its own norm)",
    "loss": "criterion: axis, reduction, label smoothing; or logits that differ (run 01_test_forward)",
    "metric": "ties, the k of top-k, the last partial batch, an average of averages",
    "samples": "a last batch that is not full left out (drop_last), or images counted twice",
    "files": "class folders or files listed in another order, or filtered by suffix",
    "label": "class folders sorted otherwise; labels off by one; samples in another order",
    "distribution": "reset_parameters not called or past this layer; fan-in or the fan of a group, another gain, no "
    "normal; an initializer that is built and dropped (Paddle's nn.initializer.Normal(weight) fills nothing)",
    "independence": "one draw used twice: broadcast, or the generator seeded again",
    "seed": "a generator that the seed does not reach (NumPy's, or one made anew)",
    "trajectory": "weight decay, momentum, learning rate, or the statistics' momentum over a whole run",
}
# A factor between two numbers. Of a loss or a gradient, sums of the same terms: float32 rounds such sums by some 1e-7.
# Of initial values: a standard deviation over n values is off by a share of sqrt(1 / 2n), 2 % of 1250; the roots below
# are 9 % apart and more.
EXACT_RATIO, NEAR_GAIN = 1e-6, 0.02
SUMMED = ("loss", "gradient")
GAINS = {  # the square of a factor between initial values: what is behind it
    2: "the gain of ReLU, on one side",
    3: "a bound of uniform numbers given as a standard deviation, or the other way round",
    5: "a=sqrt(5) of kaiming_uniform_ given as a gain",
    6: "kaiming_uniform_ without the a=sqrt(5) of PyTorch's own layers",
}


def badness(row: Row) -> tuple[int, float]:
    """A sort key: `ORDER`, then the share of the limit, NaN last."""
    return ORDER.index(row.status), float("inf") if math.isnan(row.share) else row.share


def shape(row: Row) -> str:
    """2x3, or "scalar"."""
    return "x".join(map(str, row.shape)) or "scalar"


def with_layer(row: Row, types: Mapping[str, str]) -> str:
    """The name; of outputs with the layer type."""
    layer = types.get(row.item.module) if row.item.kind == "output" else None
    return f"{row.name} ({layer})" if layer else row.name


def _values(row: Row) -> str:
    if row.reason:
        return row.reason
    text = f"max|d| {row.difference:<8.1e} limit {row.atol:<8.1e}"
    if row.status == FAIL and row.worst:
        text += f" outside {row.worst.outside}/{row.worst.size} ({row.worst.outside / row.worst.size:.1%})"
    return text.rstrip()


def row_line(row: Row) -> str:
    """An item as one line of the log."""
    return f"  {WORDS[row.status]:<7} {row.name}  {shape(row)}  {_values(row)}"


def block_of(item: Item) -> str:
    """The item's group: section, iteration and kind, or an output's block."""
    where = str(replace(item, name=""))
    if item.kind == "buffer" and not where:
        return "running statistics"
    return where or (".".join(item.name.split(".")[:2]) if item.kind == "output" else item.name)


def section_of(item: Item) -> str:
    """The group in `align`: "eval mode, float64/output"."""
    return "/".join(part for part in (item.section, item.kind) if part)


@dataclass(frozen=True)
class Group:
    """Items shown in one line, with the status of the worst."""

    label: str
    rows: list[Row]

    @property
    def worst(self) -> Row:
        return max(self.rows, key=badness)

    @property
    def section(self) -> str:
        """Of the items, without the layer: "eval mode, float64, isolated layers"."""
        return self.rows[0].item.section.partition("/")[0]

    @property
    def size(self) -> str:
        """A single item's shape, else the number of items."""
        if len(self.rows) == 1:
            return shape(self.worst)
        bad = len(Verdict("", self.rows).bad)
        return f"{bad} of {len(self.rows)} items" if bad else f"{len(self.rows)} items"


def groups_of(rows: Iterable[Row], group: Callable[[Item], str]) -> list[Group]:
    """Consecutive rows to which `group` gives the same label."""
    found = ((label, list(members)) for label, members in groupby(rows, key=lambda row: group(row.item)))
    return [Group(label or members[0].name, members) for label, members in found]


def folded(groups: Iterable[Group]) -> list[Group]:
    """Consecutive groups of one section that passed, as one group."""
    found: list[Group] = []
    for (passed, section), each in groupby(groups, key=lambda group: (group.worst.status == PASS, group.section)):
        members = list(each)
        if not passed or len(members) == 1:
            found += members
            continue
        label = section or f"{members[0].label} to {members[-1].label}"
        found.append(Group(label, [row for member in members for row in member.rows]))
    return found


def table(rows: Iterable[Row], group: Callable[[Item], str], fold: bool = False) -> list[str]:
    """A line a group; with `fold`, see `folded`."""
    groups = groups_of(rows, group)
    groups = folded(groups) if fold else groups
    width = max((len(each.label) for each in groups), default=0)
    lines = []
    for each in groups:
        worst = each.worst
        line = f"  {WORDS[worst.status]:<7} {each.label:<{width}}  {each.size:<16} {_values(worst)}"
        line = line if len(each.rows) == 1 else f"{line}  at {worst.name}"
        accepted = len(Verdict("", each.rows).accepted)
        lines.append(f"{line}; {accepted} accepted" if accepted else line)
    return lines


def usual_causes(item: Item, types: Mapping[str, str], hints: Mapping[str, str]) -> str:
    """The usual causes, or "". `types`: {module: layer type}; `hints` come before CAUSES."""
    if item.kind in hints:
        return hints[item.kind]
    if item.kind == "output" and item.module:
        return CAUSES.get(types.get(item.module, ""), "")
    return CAUSES.get(f"buffer {item.leaf}" if item.kind == "buffer" else item.kind, "")


def first_difference(verdict: Verdict, types: Mapping[str, str]) -> list[str]:
    """The first failing item and its usual causes, as lines."""
    row = verdict.first_failure
    if row is None:
        return []
    word = "difference" if row.status == FAIL else "refusal"
    lines = [f"first {word}: {with_layer(row, types)}: {_values(row)}"]
    if row.worst:
        line = f"  worst{row.place}: reference {row.worst.ref!r}, port {row.worst.port!r}"
        if isinstance(row.worst.ref, (float, complex)) and row.scale > 0:
            line += f", {row.difference / row.scale:.1e} of the largest value"
        lines.append(line)
    before = verdict.rows[: verdict.rows.index(row)]
    if before and all(other.status in (PASS, NOT_JUDGED) for other in before):
        lines.append(f"  all items before it agree ({len(before)}): look at {row.name} itself")
    if row.status == FAIL and (causes := usual_causes(row.item, types, verdict.hints)):
        lines.append(f"  usual causes: {causes}")
    return [*lines, *_ratio(row)]


def _ratio(row: Row) -> list[str]:
    """What a factor tells that two numbers are apart."""
    if row.status != FAIL or row.worst is None:
        return []
    ref, port = row.worst.ref, row.worst.port
    if not isinstance(ref, float) or not isinstance(port, float) or not (ref and port and math.isfinite(ref / port)):
        return []
    whose, other = ("port", "reference") if abs(port) > abs(ref) else ("reference", "port")
    ratio = max(port / ref, ref / port)
    if row.item.kind in SUMMED and round(ratio) > 1 and abs(ratio - round(ratio)) <= EXACT_RATIO * ratio:
        times = f"the {whose}'s number there is exactly {round(ratio)} times the {other}'s"
        return [f"  {times}: a sum for a mean, over samples, processes or accumulated batches?"]
    for square, cause in GAINS.items() if row.item.kind == "distribution" else ():
        if abs(ratio / math.sqrt(square) - 1) <= NEAR_GAIN:
            return [f"  the {whose}'s number there is near the root of {square} times the {other}'s: {cause}?"]
    return []


def grouped(what: str, reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason of {name: reason}, with its first names."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    lines = []
    for reason, names in groups.items():
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        lines.append(f"{what}{reason}: {', '.join(names[:5])}{more}")
    return lines


def _limit_lines(verdict: Verdict) -> list[str]:
    widened: dict[str, list[tuple[float, Row]]] = {}
    for row in verdict.rows:
        if row.widened_by and row.status == PASS:
            share_of_scale = row.atol / max(row.scale, 1e-300)
            widened.setdefault(row.widened_by, []).append((share_of_scale, row))
    lines = []
    for word, rows in widened.items():
        share, widest = max(rows, key=itemgetter(0))
        hidden = f"; a relative change of {widest.hidden:.1e} could hide in it" if widest.hidden else ""
        at_most = f"at most to {share:.1e} of the largest value, at {widest.name}"
        lines.append(f"  limits widened, {word}: {len(rows)} items, {at_most}{hidden}")
    for row in verdict.not_judged[:1]:
        lines.append(f"  not judged: {len(verdict.not_judged)} items, first {row.name}: {row.reason}")
    return lines


def render(verdict: Verdict, group: Callable[[Item], str], types: Mapping[str, str]) -> str:
    """The whole text report."""
    refusal = [f"  REFUSED {verdict.refusal}"] if verdict.refusal and verdict.status == REFUSED else []
    return "\n".join([verdict.title, *_body(verdict, group, types), *refusal])


def render_sections(verdict: Verdict, passes: str = "", doubt: Sequence[str] = (), fold: bool = False) -> str:
    """A verdict of `align`, with the place where it departs; the first `doubt` is one of its caveats."""
    location = verdict.location.lines() if verdict.location else []
    last = last_line(verdict.title, verdict)
    notes = [*verdict.notes, passes] if passes else verdict.notes
    return "\n".join([*notes, *_body(verdict, section_of, {}, fold), *location, *doubt[1:], last])


def render_items(verdict: Verdict, fold: bool = False) -> str:
    """A verdict of `compare`: a line an item."""
    return "\n".join([*_body(verdict, str, {}, fold), last_line(verdict.title, verdict)])


def _body(verdict: Verdict, group: Callable[[Item], str], types: Mapping[str, str], fold: bool = False) -> list[str]:
    refusal = [f"  REFUSED {verdict.refusal}"] if verdict.refusal and verdict.status == FAIL else []
    return [*table(verdict.rows, group, fold), *refusal, *_limit_lines(verdict), *first_difference(verdict, types)]


def _alike(first: Row, rows: Iterable[Row]) -> str:
    """Of a gradient or parameter that does not fail alone: how many of its run do, and the module that has them all."""
    kind, run = first.item.kind, replace(first.item, name="", module="")
    alike = [row for row in rows if row.item.kind == kind and replace(row.item, name="", module="") == run]
    every, bad = {row.item for row in alike}, {row.item for row in Verdict("", alike).bad}  # of several comparisons
    if kind not in ("gradient", "parameter") or len(bad) == 1:
        return ""
    module = ".".join(commonprefix([item.module.split(".") for item in bad]))
    return f"; there {len(bad)} of {len(every)} {kind}s differ" + (f", all in {module}" if module else "")


def last_line(name: str, verdict: Verdict) -> str:
    """The outcome in one line."""
    left = {"not judged": verdict.not_judged, "accepted": verdict.accepted}
    skipped = "".join(f"; {len(rows)} {words}" for words, rows in left.items() if rows)
    caveats = "".join(f"; {words}" for words in verdict.caveats)
    if verdict.status == PASS:
        return f"PASS {name}: all {len(verdict.judged)} items within their limits{skipped}{caveats}"
    if verdict.status == REFUSED:
        return f"REFUSED {name}: {verdict.why_refused}"
    outside = f"{len(verdict.bad)} of {len(verdict.judged)} items outside their limits"
    if verdict.location is None:
        first = verdict.first_failure
        assert first is not None
        return f"FAIL {name}: {outside}{skipped}, first {first.name}{_alike(first, verdict.rows)}{caveats}"
    place, *others = verdict.location.summary()
    where = "; in {}, {}".format(*verdict.location.own_class) if verdict.location.own_class[1] else ""
    more = f"; {len(others)} more at fault by {'itself' if len(others) == 1 else 'themselves'}" if others else ""
    return f"FAIL {name}: {place}{where}{more}; {outside}{skipped}{caveats}"
