"""A whole pair: compared mode by mode, judged for `portproof.align`, and where the port departs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import numpy as np

from portproof.arrays import is_projected, largest, largest_difference, projected
from portproof.backends.draws import NORMAL, UNIFORM, difference
from portproof.backends.masks import Dropped
from portproof.backends.model import BackendModel, Model
from portproof.backends.question import CONSTANTS, Question, Run
from portproof.backends.slots import Slot
from portproof.backends.trace import Inputs, ModuleCall, Trace, as_call, module_of, output_item
from portproof.compare import FAIL, PASS, Item, Items, Row, Verdict, compare, joined, leaves_the_model, tensor_item
from portproof.compare.accepted import NOTHING, Accepted
from portproof.compare.ruler import MOST_ROUNDING, Distances, Ruler, S, exact_atol, moved_distances
from portproof.convert.rules import COUNT
from portproof.ladder.pairs.as_built import TITLE as BUFFERS_AS_BUILT
from portproof.ladder.pairs.as_built import compare_as_built
from portproof.ladder.pairs.pair import (
    MODES,
    Options,
    Pair,
    check_reference,
    other_inputs,
    switch_off_drawing,
    switch_off_random,
)
from portproof.localize.isolated import (
    OTHER_FORM,
    OTHER_INPUTS,
    Calls,
    IsolatedRuns,
    isolated_modules,
    without_optional,
)
from portproof.localize.locate import (
    KINDS,
    OTHER_VALUES,
    Location,
    counterpart_or_block,
    locate,
    module_tree,
    numbers,
)
from portproof.mapping.agreement import alike, alike_in_any_order, exchanged_axes
from portproof.mapping.module_calls import EXACT
from portproof.mapping.name_map import NameMap, match_calls
from portproof.python39 import zip_strict
from portproof.report.text import grouped, last_line, render_sections
from sturdyio.cli import MachineError, UserError

BY_CONSTANTS = ("rounded", "float32 data")  # limits of whole models that float32 constants widened
TIES = 16  # runs: one in four changes the order of two equal values; none of all once in 100 times
MIRRORED = {UNIFORM: "1 - u for u", NORMAL: "-x for x"}
_OWN_RUN = " (this run in float64 is the check's own: a port that works in float32 alone is judged in that alone)"


@dataclass(frozen=True)
class Compared:
    """One comparison; of whole models with the precision and both runs."""

    verdict: Verdict
    dtype: str = ""
    ref: Run | None = None
    port: Run | None = None


def compare_mode(pair: Pair, train: bool) -> Iterator[Compared]:
    """float64: everything. float32: the forward pass and, with a cotangent, isolated gradients.

    Where only values inside the model differ, the two are equal but built differently, which is noted unless the pair
    is `strict`. A mode that cannot be compared gives only the reason. Raises UserError where the reference cannot run,
    and for a port without a float64 kernel that is judged in float64 alone.
    """
    refused = None if pair.strict else random_or_unclear(pair, train)
    if refused is None:
        mode = _Mode(pair, train)
        refused = Verdict(f"{mode.mode} mode", refusal=mode.refusal) if mode.refusal else None
    if refused is not None:
        yield Compared(refused)
        return
    if train and (differing := compare_dropout(pair)) is not None:
        yield Compared(differing)
    for dtype in pair.precisions:
        yield from mode.compare(dtype)
    if pair.cotangents is not None and "float32" in pair.precisions:
        calls = pair.ask(pair.ref, "float64", train).trace.calls
        pair.ref.forget()
        pair.port.forget()
        may_differ = mode.may_differ and mode.port_calls is not None
        yield Compared(isolated_gradients(pair, train, calls, mode.port_calls, may_differ))


def compare_dropout(pair: Pair) -> Verdict | None:
    """The verdict on what dropout would drop, which is off in every run; None where nothing differs.

    In any order, in layers or functions, apart or joined: as many numbers decide with the same probability.
    """
    ref_run, port_run = (pair.ask(model, "float64", True) for model in (pair.ref, pair.port))
    ref, port = ref_run.trace.dropped, port_run.trace.dropped
    if _chances(ref) == _chances(port):
        if alike(ref_run.output, port_run.output, EXACT):
            pair.notes += _dropout_notes(pair, ref_run, port_run)
        return None
    left, port_left = _without_equal(ref, port), _without_equal(port, ref)
    if any(f"{each.name}.".startswith(pair.left_out) for each in left):  # what stands for it there is not known
        pair.notes.append("dropout is not compared, since some of it is left out")
        return None
    hidden = [each for each in (*left, *port_left) if not each.size]
    if hidden and len(hidden) < len(left) + len(port_left):
        names = ", ".join(f"{each.name} (p {each.p:g})" for each in hidden)
        pair.notes.append(f"dropout is off, and not compared, since a kernel does it inside of {names}")
        return None
    return Verdict("train mode", [_dropout_row(*each) for each in zip_longest(left, port_left)])


def _dropout_notes(pair: Pair, ref: Run, port: Run) -> list[str]:
    """Of dropout layers in which as much is dropped as in layers of the port: where and of which kind these differ."""
    calls, port_calls, words = _dropout_calls(pair.ref, ref), _dropout_calls(pair.port, port), dict[str, str]()
    for key, ours in calls.items():
        theirs = port_calls.get(key, [])
        if len(ours) != len(theirs):  # some are joined on one side
            continue
        for call, in_turn in zip(ours, theirs):
            candidates = (in_turn, *theirs)
            same = next((each for each in candidates if alike_in_any_order(call.inputs, each.inputs, EXACT)), None)
            if same is None:
                words[call.label] = "dropout here drops other values than the port's, so it is in another place"
            elif _is_alpha(pair.ref, call) != _is_alpha(pair.port, same):
                words[call.label] = "dropout is alpha dropout on one side only, which is not compared"
    return grouped("", words)


def _dropout_calls(model: Model, run: Run) -> dict[tuple[float, int], list[ModuleCall]]:
    """{(p, how many numbers decide): calls of layers, in order}, but where functions drop, whose input is unknown"""
    of_layers = defaultdict(list)
    for call in run.trace.calls.values():
        if "Dropout" in model.modules[call.name].type:
            of_layers[call.name].append(call)
    found, in_functions = defaultdict(list), set()
    for each in run.trace.dropped:
        if of_layers[each.name]:
            found[each.p, each.size].append(of_layers[each.name].pop(0))
        else:
            in_functions.add((each.p, each.size))
    return {key: calls for key, calls in found.items() if key not in in_functions}


def _is_alpha(model: Model, call: ModuleCall) -> bool:
    return "Alpha" in model.modules[call.name].type


def _chances(calls: Iterable[Dropped]) -> dict[float, tuple[int, int]]:
    """{p: (how many numbers decide, how many kernels)}"""
    found: dict[float, tuple[int, int]] = {}
    for call in calls:
        size, kernels = found.get(call.p, (0, 0))
        found[call.p] = size + call.size, kernels + (not call.size)
    return found


def _without_equal(calls: Iterable[Dropped], others: Iterable[Dropped]) -> list[Dropped]:
    """Those that no call of the others equals."""
    counts = Counter((other.p, other.size) for other in others)
    left = []
    for call in calls:
        counts[call.p, call.size] -= 1
        if counts[call.p, call.size] < 0:
            left.append(call)
    return left


def _dropout_row(ref: Dropped | None, port: Dropped | None) -> Row:
    """Of two calls that differ, or of one that the other side lacks; its difference is that of p."""
    either = ref or port
    assert either is not None
    difference, who = either.p, f"the port's {port.name or 'own code'}" if port else "the port"
    if port is None:
        reason = f"{who} does not drop here, the reference does, with p {either.p:g}"
    elif ref is None:
        reason = f"{who} drops with p {port.p:g}, the reference does not"
    elif ref.p != port.p:
        reason, difference = f"p is {port.p:g} in {who}, not {ref.p:g}", abs(port.p - ref.p)
    else:
        reason = f"{who} drops by {port.size} numbers, not {ref.size}: whole channels, or single values?"
    name = either.name if ref else f"port's {either.name}"
    item = Item("dropout", "dropout", name, section=name)
    return Row(item, FAIL, difference=difference, reason=reason)


def random_or_unclear(pair: Pair, train: bool) -> Verdict | None:
    """The verdict if a side stays random, the sides draw differently, or output keys differ; else None.

    Modules that are random in train mode, beside lent draws or with others than the other side's, are switched off if
    possible, and named.
    """
    mode, sides, still = f"{MODES[train]} mode", (pair.ref, pair.port), {}
    pair.mirror(())
    for model in sides:
        _, still[model] = switch_off_random(model, pair.question(model, "float64", train))
    runs = [pair.ask(model, "float64", train) for model in sides]
    if (train or runs[0].trace.draws) and (row := _without_draws(pair, *runs)) is not None:
        return Verdict(mode, [row])
    if train and _draw_differently(*runs) and not pair.ref.is_recorded:
        for model, run in zip_strict(sides, runs):
            switch_off_drawing(model, run)
        runs = [pair.ask(model, "float64", train) for model in sides]
    places = [run.places for run in runs]
    differs = _draw_differently(*runs)
    if differs and not train and not runs[0].trace.draws:  # then the port must not be random
        drawing = (call for call in runs[1].trace.calls.values() if call.draws)
        still[pair.port] = max(drawing, key=attrgetter("start")).name
    for model, name in still.items():
        if model.switched_off:
            names = ", ".join(sorted(model.switched_off))
            pair.notes.append(f"random in train mode, and run as in eval mode: the {model.role}'s {names}")
        if name is None:
            continue
        reason = f"the {model.role} gives another result each time it runs in {mode}"
        where = f"random numbers are taken by {name or 'its own code'}"
        if model is pair.port and not train:
            item = Item("the same each time", mode="eval")
            return Verdict(mode, [Row(item, FAIL, reason=f"{reason}, {where}: is dropout on?")])
        fix = "draw with rand, randn, normal or bernoulli, which are lent to both sides, or judge the other mode"
        return Verdict(mode, refusal=f"{reason}, dropout layers aside, {where}: {fix}")
    if differs:
        told = f"the sides draw differently in {mode}: the reference {differs[0]}, the port {differs[1]}"
        return Verdict(mode, refusal=f"{told}: draw the same kind and shape on both sides, or judge the other mode")
    if runs[0].trace.draws:
        _lend(pair, train, *runs)
    if all(places) and "" not in places[0] + places[1] and set(places[0]).isdisjoint(places[1]):
        ref, port = (", ".join(place.strip("[]") for place in side) for side in places)
        which = "say which is which with outputs (--match REF=PORT)"
        return Verdict(mode, refusal=f"the reference returns {ref} and the port {port}: {which}")
    return None


def _draw_differently(ref: Run, port: Run) -> tuple[str, str] | None:
    return None if port.trace.error else difference(ref.trace.draws, port.trace.draws)


def _without_draws(pair: Pair, ref: Run, port: Run) -> Row | None:
    """The row that fails if one side draws, the other takes no random numbers, and the outputs differ."""
    run, who, other = (ref, "reference", "port") if ref.trace.draws else (port, "port", "reference")
    silent = pair.port if other == "port" else pair.ref
    same_dropout = _chances(ref.trace.dropped) == _chances(port.trace.dropped)
    if bool(ref.trace.draws) == bool(port.trace.draws) or silent.switched_off or not same_dropout:
        return None
    if port.trace.error or alike(ref.output, port.output):
        return None
    name = next(call.name for call in run.trace.calls.values() if call.draws)  # the innermost
    drawn = ", ".join(dict.fromkeys(map(str, run.trace.draws)))
    reason = f"the {who} draws {drawn} in {name or 'its own code'}, the {other} nothing"
    name = name if who == "reference" else f"port's {name}"
    return Row(Item("random numbers", "dropout", name, section=name), FAIL, reason=reason)


def _lend(pair: Pair, train: bool, ref: Run, port: Run) -> None:
    """Lend the port -x for x, or 1 - u for u, if that alone makes both alike: it is as likely. Note what is lent."""
    drawn = {draw.kind for draw in port.trace.draws}
    word = ""
    for kinds in ((), (UNIFORM,), (NORMAL,), (UNIFORM, NORMAL)):
        if drawn.issuperset(kinds):
            pair.mirror(kinds)
            if alike(ref.output, pair.ask(pair.port, "float64", train).output):
                word = f", where the port uses {' and '.join(MIRRORED[k] for k in kinds)}, as likely" if kinds else ""
                break
    else:
        pair.mirror(())
    told = ", ".join(dict.fromkeys(map(str, ref.trace.draws)))
    pair.notes.append(f"random numbers are lent to both sides in {MODES[train]} mode: {told}{word}")


class _Mode:
    def __init__(self, pair: Pair, train: bool) -> None:
        self.pair = pair
        self.train = train
        self.mode = MODES[train]
        self.may_differ = not pair.strict  # inside, if all that leaves the model is equal so far
        self.agrees_elsewhere: bool | None = None  # not tried yet
        self.decided: list[Item] = []
        self.port_calls: Calls | None = None
        pair.match_calls([train])
        run = pair.ask(pair.ref, "float64", train)
        check_reference(run, train, pair.inputs)
        self.changed = _changed_outside(pair, run) if train else []
        word = "not compared, though a pass in train mode changes it, since nothing in the port is paired with it"
        pair.notes += [f"{word}: {key}" for key in self.changed]
        self.input_scales = run.trace.input_scales
        fp64_ref = items(pair, run, False)
        self.left_out = [i for i, a in fp64_ref.items() if a.dtype.kind in "fc" and not np.isfinite(largest(a))]
        judged = [item for item in self.left_out if pair.strict or not _stays_inside(item)]
        masks = [item for item in self.left_out if item not in judged]
        self.refusal = f"the reference itself gives NaN or infinity at {judged[-1]}" if judged else ""
        pair.notes += [f"not compared, since it is not finite, a mask perhaps: {item}" for item in masks]

    def compare(self, dtype: str) -> Iterator[Compared]:
        """Compare in one precision; nothing in float64 where the port lacks a kernel."""
        pair, mode = self.pair, self.mode
        ref_run, port_run = (pair.ask(model, dtype, self.train) for model in (pair.ref, pair.port))
        if dtype == "float64" and port_run.trace.lacking:
            lacking = f"the port's framework has no kernel in float64 for {port_run.trace.lacking}"
            if "float32" not in pair.precisions:
                raise UserError(f"{lacking}: judge the port in float32")
            pair.notes.append(
                f"{lacking}: {mode} mode was not run in float64, float32's limits alone judge it:"
                " less than these, and gradients in code between layers, are not proved"
            )
            return
        data = sorted({*ref_run.trace.float32_data, *port_run.trace.float32_data})
        options: dict[str, Any] = {"input_scales": self.input_scales, "decided": self.decided}
        if dtype == "float64":
            pair.notes += [*_run_notes("reference", ref_run), *_run_notes("port", port_run)]
            options["has_float32_data"] = bool(data) and not pair.strict
            if pair.ref.float32_data or pair.port.float32_data:
                options["rounded"] = self._moved
        if dtype == "float64" and self.may_differ and self._is_unpaired_though_equal(ref_run, port_run):
            self.may_differ = self._agree_on_other_inputs()
        ref = self._items(dtype, ref_run, False)
        if dtype == "float64" or self.port_calls is None:  # float32 alone judges them
            options["must_be_judged"] = list(filter(leaves_the_model, ref))
        port = without_optional(self._items(dtype, port_run, True), ref, pair.port)
        port |= {} if pair.strict else self._in_form(ref, port)
        ruler = Ruler.measured(ref, dtype, self._again, **options)
        verdict = ruler.compare(port, title=f"{mode} mode, {dtype}", mode=mode, dtype=dtype)
        verdict = with_error(verdict, port_run, mode, dtype)
        failed = [row.item for row in verdict.rows if row.status == FAIL]
        self.decided = [replace(item, mode="", dtype="") for item in failed]
        # What a pass leaves in a buffer does not leave the model; Paddle's running variance differs in any case.
        inside = [item for item in failed if item.kind != "buffer"]
        self.may_differ &= all(map(_stays_inside, inside))
        if dtype == "float64" and self.may_differ:
            idle = [module for module in dict.fromkeys(item.module for item in inside) if self._is_idle(module, ref)]
            self.may_differ = not idle and (not inside or self._agree_on_other_inputs())
        if any(row.widened_by == "float32 data" for row in verdict.rows):
            where = ", ".join(name or "the model itself" for name in data)
            pair.notes.append(f"float32 data come in at {where}: what differs is judged with float32's limits")
        if any(row.widened_by == "rounded" for row in verdict.rows):
            sides = (("", pair.ref), ("the port's ", pair.port))
            held = [who + key for who, model in sides for key in model.float32_data]
            word = "held in float32 by one side only, and limits allow for its rounding"
            pair.notes += [f"{word}: {', '.join(held)}"] if held else []
        if verdict.not_judged and list(pair.precisions) == ["float32"]:
            first = verdict.not_judged[0].name
            verdict = replace(verdict, refusal=f"float32 keeps no digit of {first}: judge the port in float64, too")
        if self.changed and dtype == "float64":
            count = len(self.changed)
            caveat = f"{count} buffer{'s' if count > 1 else ''} not compared"
            verdict = replace(verdict, caveats=[*verdict.caveats, caveat])
        if dtype == "float32" and self.port_calls is None and pair.cotangents is not None:
            verdict = replace(verdict, caveats=[*verdict.caveats, "gradients in code between layers not compared"])
        if self.may_differ:
            words = {_label(item): pair.built_differently.get(item.module, OTHER_VALUES) for item in failed}
            verdict = without_faultless(pair, verdict, words)
        yield Compared(verdict, dtype, ref_run, port_run)
        if dtype == "float64" and not pair.strict and any(row.widened_by in BY_CONSTANTS for row in verdict.rows):
            yield Compared(modules_without_constants(pair, self.train, ref_run.trace, port_run.trace))
        if dtype == "float64":
            self.port_calls = port_run.trace.calls
            pair.port.forget()

    def _is_unpaired_though_equal(self, ref: Run, port: Run) -> bool:
        """Whether the outputs agree, and a module's own was paired with none: it differs, or is built differently."""
        return any(label not in self.pair.name_map.calls for label in ref.trace.calls) and alike(
            ref.output, port.output, EXACT
        )

    def _agree_on_other_inputs(self) -> bool:
        """Whether the outputs agree on other inputs and weights, too: what differs inside may count there."""
        pair = self.pair
        if self.agrees_elsewhere is None:
            self.agrees_elsewhere = self._compared_on_other_inputs() and self._agree_with_other_weights()
            if not self.agrees_elsewhere and pair.name_map == pair.whole_map:  # else modules are left out
                match_calls(pair.name_map, pair.ref, pair.port, pair.inputs, self.train, is_faulty=True)
        return self.agrees_elsewhere

    def _compared_on_other_inputs(self) -> bool:
        for how, inputs in other_inputs(self.pair.inputs):
            with suppress(MachineError):  # what these inputs need ends their trial alone
                if self._differ_on(how, Question.of_model(inputs, "float64", self.train)):
                    return False
        return True

    def _differ_on(self, how: str, question: Question) -> bool:
        ref, port = (self._outputs(model, question) for model in (self.pair.ref, self.pair.port))
        if not ref or not all(np.isfinite(largest(array)) for array in ref) or alike(ref, port, EXACT):
            return False
        if self._is_undecided(question, ref, port):
            word = "where a last digit changes the reference's own as much: a tie, or a value at a bound"
            self.pair.notes.append(f"the outputs differ on other inputs ({how}), {word}")
            return False
        self.pair.notes.append(f"the outputs agree on these inputs, and differ on others: {how}")
        return True

    def _outputs(self, model: Model, question: Question) -> list[np.ndarray]:
        return list(map(projected, model.ask(question).output))

    def _is_undecided(self, question: Question, ref: Sequence[np.ndarray], port: Sequence[np.ndarray]) -> bool:
        """Whether the reference's outputs differ as much where its inputs and weights change in the last digit.

        So they do where a value is equal to another one, or to a bound, and not only by what rounding moves.
        """
        if self.pair.ref.is_recorded or [array.shape for array in ref] != [array.shape for array in port]:
            return False
        apart = [largest_difference(*arrays) for arrays in zip_strict(ref, port)]
        for i in range(1, TIES + 1):
            moved = self._outputs(self.pair.ref, replace(question, perturbation=i))
            own = [largest_difference(*arrays) for arrays in zip_strict(ref, moved)]
            if all(alike([r], [p], EXACT) or a <= S * b for r, p, a, b in zip_strict(ref, port, apart, own)):
                return True
        return False

    def _agree_with_other_weights(self) -> bool:
        """Whether the outputs agree with weights that enter more branches where an output depends on it."""
        pair, model = self.pair, self.pair.ref
        if not isinstance(model, BackendModel) or model.is_large or not any(model.branches.values()):
            return True
        from portproof.backends.branches import reach

        found = reach(model, pair.inputs, self.train, counting=True)
        if found is None:
            return True
        own = self.train and bool(model.in_train)
        try:
            with model.with_weights(found[0], own):
                arrays = model.arrays(own)
                ref = pair.ask(model, "float64", self.train).output
            with pair.port.with_weights({theirs: arrays[key] for key, theirs in pair.name_map.tensors.items()}, own):
                port = pair.ask(pair.port, "float64", self.train).output
        except MachineError:  # what these weights need ends their trial alone
            return True
        agree = not all(np.isfinite(largest(array)) for array in ref) or alike(ref, port, EXACT)
        if not agree:
            pair.notes.append("the outputs agree with these weights, and differ with others")
        return agree

    def _is_idle(self, module: str, ref: Items) -> bool:
        """Whether the module has weights on which no output depends here: saturated, say. Then it is not proved equal.

        No gradient reaches them, and the port's outputs stay bit for bit where its own are moved by a thousandth.
        """
        pair, prefix = self.pair, f"{module}."
        trained = [key for key, slot in pair.ref.slots.items() if key.startswith(prefix) and slot.trained]
        compared = map(pair.ref.compared_as, trained)
        reached = [key for key in compared if np.any(ref.get(tensor_item(key, "gradient"), 0.0))]
        keys = [pair.name_map.tensors[key] for key in trained if key in pair.name_map.tensors]
        if reached or not keys:
            return False
        own = self.train and bool(pair.port.in_train)
        arrays, before = pair.port.arrays(own), pair.ask(pair.port, "float64", self.train).output
        with pair.port.with_weights({key: arrays[key] * 1.001 for key in keys}, own):
            after = pair.ask(pair.port, "float64", self.train).output
        return all(map(np.array_equal, before, after))

    def _items(self, dtype: str, run: Run, is_port: bool) -> dict[Item, np.ndarray]:
        found = items(self.pair, run, is_port)
        if dtype == "float32":
            found = {item: array for item, array in found.items() if item.kind != "gradient"}
        return {item: array for item, array in found.items() if item not in self.left_out}

    def _in_form(self, ref: Items, port: Items) -> dict[Item, np.ndarray]:
        """Outputs inside that the port has with other axes, or in another order of them, in the reference's."""
        found = {}
        for item in filter(_stays_inside, ref.keys() & port.keys()):
            own, wanted = port[item], ref[item]
            is_plain = own.shape == wanted.shape and (len(set(own.shape)) == own.ndim or alike([wanted], [own]))
            axes = None if is_plain else exchanged_axes(own, wanted)
            if axes:
                found[item] = own.transpose(axes)
            elif own.shape != wanted.shape and alike([wanted], [own]):
                found[item] = own.reshape(wanted.shape)
            if item in found:
                self.pair.built_differently.setdefault(item.module, OTHER_FORM)
        return found

    def _again(self, dtype: str, perturbation: int = 0) -> Items:
        return items(self.pair, self.pair.ask(self.pair.ref, dtype, self.train, perturbation), False)

    def _moved(self) -> list[Distances]:
        """What the rounding of constants moves that only one side holds."""
        found: list[Distances] = []
        for model, is_port in ((self.pair.ref, False), (self.pair.port, True)):
            if model.float32_data:
                runs = (self.pair.ask(model, "float64", self.train, perturbation) for perturbation in (0, CONSTANTS))
                found.append(moved_distances(*(items(self.pair, run, is_port) for run in runs)))
        return found


def with_error(verdict: Verdict, run: Run, mode: str, dtype: str) -> Verdict:
    """`verdict` on a run of the port, with a row that fails if the port raised."""
    if not run.trace.error:
        return verdict
    reason = f"it raised {run.trace.error}{_OWN_RUN if dtype == 'float64' else ''}"
    row = Row(Item("the port runs", mode=mode, dtype=dtype), FAIL, reason=reason)
    return replace(verdict, rows=[*verdict.rows, row])


def _stays_inside(item: Item) -> bool:
    return item.kind == "output" and bool(item.module)


def _label(item: Item) -> str:
    return item.name.partition("[")[0]


def without_faultless(pair: Pair, verdict: Verdict, words: Mapping[str, str]) -> Verdict:
    """`verdict` without outputs of modules that are built differently, which are noted.

    `words` say how they differ, by the label of the call.
    """
    rows = []
    for row in verdict.rows:
        item = row.item
        if row.status == FAIL and _stays_inside(item) and _label(item) in words:
            pair.built_differently[item.module] = words[_label(item)]
        else:
            rows.append(row)
    return replace(verdict, rows=rows)


def _run_notes(side: str, run: Run) -> list[str]:
    """Where a float64 run asks for float32, and what could not be recorded."""
    trace, notes = run.trace, []
    if trace.float32:
        modules = ", ".join(sorted(name or "the model itself" for name in trace.float32))
        notes.append(f"the {side} asks for float32, and gets float64 in the float64 run: in {modules}")
    for name, reason in trace.unrecorded.items():
        notes.append(f"not recorded of the {side}: {name or 'the model itself'}: {reason}")
    return notes


def isolated_gradients(
    pair: Pair, train: bool, calls: Calls, port_calls: Calls | None = None, is_equal: bool = False
) -> Verdict:
    """float32 gradients of each layer alone, on the inputs of the reference's run.

    Through a whole network they cannot be judged: one activation that rounding moves across a kink changes them by a
    percent, in either framework. Alone, a layer receives the same on both sides, off its kinks (activations.py), drawn
    upstream gradients too. If the whole `is_equal` in float64, a layer that differs there too is built differently.
    """
    pair.match_calls([train])
    runs = IsolatedRuns(pair.ref, pair.port, pair.name_map, pair.inputs, train, calls, port_calls)
    rows = []
    for label, found in isolated_modules(runs, "float32", lambda label: pair.ref.modules[calls[label].name].is_leaf):
        name, differs = calls[label].name, "gradient" in found.kinds
        if found.port_run.trace.lack:
            pair.notes.append(f"not run alone in float32: {name}: {found.rows[0].reason}")
        if not found.attempt.complete:
            pair.built_differently.setdefault(name, found.attempt.built_differently)
        elif differs and is_equal and not runs.run(label, "float64", True, adjusted=False).passed:
            pair.built_differently.setdefault(name, OTHER_VALUES)
        else:
            there: dict[str, Any] = {"mode": MODES[train], "dtype": "float32", "section": label}
            gradients = (row for row in found.rows if row.item.kind == "gradient")
            rows += [replace(row, item=replace(row.item, **there)) for row in gradients]
    return Verdict(f"{MODES[train]} mode, float32, isolated layers", rows)


def modules_without_constants(pair: Pair, train: bool, trace: Trace, port_trace: Trace) -> Verdict:
    """Each module alone in float64, where a constant that one side rounds to float32 widened the limits of the whole.

    Alone a module has no such constant, unless it holds it; those that make one are left out. The whole agrees; so what
    differs by more than a constant may be off (MOST_ROUNDING of the largest value), which no such limit hides, is built
    differently.
    """
    calls = trace.calls
    runs = IsolatedRuns(pair.ref, pair.port, pair.name_map, pair.inputs, train, calls, port_trace.calls)

    def has_none(label: str) -> bool:
        name, port_name = calls[label].name, module_of(pair.name_map.calls[label])
        sides = (name, trace.float32_data), (port_name, port_trace.float32_data)
        return bool(name) and not any(f"{each}.".startswith(f"{own}.") for own, made in sides for each in made)

    rows = []
    for label, found in isolated_modules(runs, "float64", has_none):
        shares = [row.difference / row.scale for row in found.rows if row.status == FAIL and row.worst and row.scale]
        if found.attempt.complete and (found.passed or shares and max(shares) <= MOST_ROUNDING):
            there: dict[str, Any] = {"mode": MODES[train], "dtype": "float64", "section": label}
            rows += [replace(row, item=replace(row.item, **there)) for row in found.rows]
    return Verdict(f"{MODES[train]} mode, float64, isolated modules", rows)


def structure(pair: Pair) -> Verdict:
    """Whether every tensor of the reference has a counterpart of its shape; with what no run of the pair can prove."""
    name_map = pair.name_map
    rows = [Row(Item(name, "structure"), FAIL, reason=reason) for name, reason in name_map.problems.items()]
    for name, port_name in name_map.tensors.items():
        slots = pair.ref.slots[name], pair.port.slots[port_name]
        rows.append(compare_precisions(tensor_item(name, "structure"), *slots))
    return Verdict("parameters and buffers", rows, caveats=branch_caveats(pair.never_entered))


def compare_precisions(item: Item, ref: Slot, port: Slot) -> Row:
    """Whether both models hold a tensor in one precision; buffers, which may be tables, in any."""
    if ref.precision == port.precision or ref.is_buffer or port.is_buffer:
        return Row(item, PASS, difference=0.0, atol=0.0)
    return Row(item, FAIL, ref.shape, reason=f"dtype: reference {ref.precision}, port {port.precision}")


def equal_weights(pair: Pair) -> Verdict:
    """Whether the port's weights are equal to the reference's, bit for bit."""
    ref_arrays, port_arrays = pair.ref.arrays(), pair.port.arrays()
    tensors = pair.name_map.tensors
    ref = {tensor_item(key, "weights"): ref_arrays[key] for key in tensors}
    port = {tensor_item(key, "weights"): port_arrays[port_key] for key, port_key in tensors.items()}
    return compare(ref, port, exact_atol(ref), title="weights as they were given")


def all_notes(pair: Pair) -> list[str]:
    """Notes for the report, first those of the map."""
    names = pair.name_map
    notes = [f"map: {len(names.tensors)} tensors, {len(names.calls)} outputs, {names.how}", *names.notes]
    typed = {f"{name} ({pair.ref.modules[name].type})": word for name, word in pair.built_differently.items()}
    was_run = {name: word for name, word in typed.items() if word != OTHER_INPUTS}
    not_run = {name: word for name, word in typed.items() if word == OTHER_INPUTS}
    notes += [*dict.fromkeys(pair.notes), *pair.port.notes()]
    notes += branch_notes(pair.ref, pair.never_entered)
    notes += [*state_notes(pair.ref), *state_notes(pair.port)]
    notes += grouped("built differently, no fault: ", was_run)
    return notes + grouped("not run alone, so nothing is known of it by itself: ", not_run)


def state_notes(model: Model) -> list[str]:
    """Attributes that a run changed: those of library layers are no state of the model's own."""
    if not isinstance(model, BackendModel):  # a recording does not tell
        return []
    own = [key for key in sorted(model.reassigned) if not model.is_of_library(key.rpartition(".")[0])]
    words = f"changed by the {model.role}'s own runs, and what a later call makes of it is not compared"
    return grouped("", dict.fromkeys(own, words))


def branch_caveats(never_entered: Sequence[str]) -> list[str]:
    count = len(never_entered)
    return [f"{count} branch{'es' if count > 1 else ''} never entered"] if count else []


def branch_notes(ref: Model, never_entered: Sequence[str]) -> list[str]:
    """What no input entered on the reference's side, and what was not watched."""
    notes = not_proved("no input enters it", never_entered)
    if not ref.is_watched:
        notes.append("branches of clip, where, minimum and the like: not watched, the reference is not in PyTorch")
    elif ref.conditions:
        where = ", ".join(sorted(name or "the model itself" for name in ref.conditions))
        notes.append(f"branches that Python takes by a tensor's numbers (`if`, item()): not watched, in {where}")
    return notes


def not_proved(why: str, places: Sequence[str]) -> list[str]:
    """A note that names the first of the places; none without places."""
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return [f"not proved, since {why}: {'; '.join(places[:5])}{more}"] if places else []


def passes(pair: Pair) -> str:
    counted = pair.ref.passes + pair.port.passes
    return f"runs: {counted['whole']} of whole models, {counted['alone']} of modules alone"


def locate_failure(
    pair: Pair, verdicts: Sequence[Verdict] = (), dtype: str = "", accepted: Accepted = NOTHING
) -> Location | None:
    """Where the port departs, in the modes that failed or in all of the pair's, but for what is accepted; else None.

    In float64, unless only float32 items failed.
    """
    failed = [row.item for verdict in verdicts for row in verdict.rows if row.status == FAIL]
    if failed and all(item.kind == "dropout" for item in failed):
        return _place_of(pair, verdicts, "dropout", "dropout")
    dtype = dtype or ("float32" if {item.dtype for item in failed} == {"float32"} else "float64")
    named = {item.mode for item in failed}
    modes: dict[bool, set[str]] = {}
    for mode in [mode for mode in MODES if mode in named] or pair.modes:
        # A training step is judged by more than one pass gives.
        whole = [item for item in failed if (item.mode, item.dtype) == (mode, "float64") and item.iteration is None]
        outside = [item for item in whole if not _stays_inside(item)]
        modes[mode == "train"] = {item.kind for item in outside or whole} & KINDS
    pair.match_calls(list(modes))
    sides = pair.ref, pair.port, pair.name_map, pair.inputs
    every = locate(*sides, modes=modes, cotangents=pair.cotangents, dtype=dtype, accepted=accepted)
    location = _not_accepted(every, accepted)
    if location is None and {item.kind for item in failed} == {"buffer"}:
        return _place_of(pair, verdicts, "buffer", "buffers")
    return location


def _not_accepted(location: Location | None, accepted: Accepted) -> Location | None:
    """The first fault that is not accepted, with the further ones."""
    if location is None or not accepted:
        return location
    every = [location, *location.also]
    left = [replace(one, also=[]) for one in every if not accepted.covers(one.name, one.row)]
    if not left:
        return None
    return replace(left[0], also=left[1:], built_differently=location.built_differently)


def _place_of(pair: Pair, verdicts: Sequence[Verdict], kind: str, phase: str) -> Location | None:
    """Where the first item of a kind that differs is; for those that no run alone shows.

    Such are what dropout drops, buffers that were built otherwise, since the reference's are loaded, and buffers that
    the port keeps in another module.
    """
    failed = (row for verdict in verdicts for row in verdict.rows if row.status == FAIL and row.item.kind == kind)
    row = next(failed, None)
    if row is None:
        return None
    names, name = pair.name_map, row.item.module
    port_name = names.modules.get(name) or module_of(names.calls.get(name, name))
    own_name = name.removeprefix("port's ")
    if own_name != name or name not in pair.ref.modules:  # only the port has it
        name, port_name = counterpart_or_block(own_name, names), own_name
    port = pair.port.modules.get(port_name)
    at_port = (port.name, port.type) if port else ("", "")
    ref, own = pair.ref.modules[name], pair.port.own_class(at_port[0])
    tree = module_tree(pair.ref, name)
    return Location(name, ref.type, phase, *at_port, row, numbers(row), tree=tree, own_class=own)


def _changed_outside(pair: Pair, run: Run) -> list[str]:
    """Buffers of the reference outside the map that this pass in train mode changed, but counts of batches."""
    before, mapped = pair.ref.arrays(train=True), pair.name_map.tensors
    left = [key for key in run.buffers if key in before and key not in mapped and not key.startswith(pair.left_out)]
    changed = [key for key in left if not np.array_equal(before[key], run.buffers[key])]
    return [key for key in changed if key.rpartition(".")[2] != COUNT]


def items(pair: Pair, run: Run, is_port: bool) -> dict[Item, np.ndarray]:
    """One side's arrays by the reference's names: outputs, gradients backward, buffers."""
    tensors, calls = pair.name_map.tensors, pair.name_map.calls
    if not is_port:
        tensors, calls = ({name: name for name in names} for names in (tensors, calls))
    outputs = renamed(run.trace.outputs, calls)
    found = {output_item(label, pair.output): array for label, array in outputs.items()}
    gradients = {key: run.gradients[own] for key, own in reversed(tensors.items()) if own in run.gradients}
    found |= pair.ref.compared_gradients(gradients)
    for i, (shape, array) in enumerate(zip(as_call(pair.inputs).float_shapes, run.input_gradients)):
        if array is not None:
            found[Item(f"input {i}", "gradient", projected=is_projected(shape))] = projected(array)
    ref_keys = {own: key for key, own in tensors.items()}
    buffers = {ref_keys[own]: array for own, array in run.buffers.items() if own in ref_keys}
    found |= {tensor_item(key, "buffer"): array for key, array in buffers.items()}
    return found | {Item(pair.output + place, "output"): as_array(value) for place, value in run.plain.items()}


def as_array(value: Any) -> np.ndarray:
    """An output that is no tensor: numbers in 64 bits, whatever precision a run computes in."""
    array = np.asarray(value)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def renamed(outputs: Mapping[str, np.ndarray], calls: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The port's outputs by the reference's names; those without a counterpart are left out."""
    ref_labels, found = {port_label: label for label, port_label in calls.items()}, {}
    for name, array in outputs.items():
        label, bracket, rest = name.partition("[")
        if label in ref_labels:
            found[ref_labels[label] + bracket + rest] = array
    return found


@dataclass(frozen=True)
class AlignVerdict(Verdict):
    """The verdict of `align`, which prints as its report."""

    names: NameMap | None = None
    passes: str = ""  # how often the models were run, in words
    doubt: Sequence[str] = ()  # of the map, see `NameMap`

    def __str__(self) -> str:
        return self.report()

    def report(self, verbose: bool = False) -> str:
        """The report; if `verbose`, with a line for each kind of item and layer that agrees."""
        return render_sections(self, self.passes, self.doubt, fold=not verbose)

    def _repr_html_(self) -> str:
        """In notebooks: the last line, under which the report unfolds."""
        unfolded = "" if self.status == PASS else " open"
        last, report = escape(last_line(self.title, self)), escape(str(self))
        return f"<details{unfolded}><summary><b>{last}</b></summary><pre>{report}</pre></details>"


def judge(ref: Any, port: Any, inputs: Inputs, options: Options, accept: Sequence[str] = ()) -> AlignVerdict:
    """What `portproof.align` does."""
    accepted = Accepted(accept)
    pair = Pair.prepared(ref, port, inputs, options)
    names = pair.whole_map
    assert names is not None
    verdicts = [structure(pair)]
    if names.ambiguous:
        rows = [row for row in verdicts[0].rows if row.status != FAIL]  # a misfit may be another reading's
        return AlignVerdict("align", rows, names.ambiguous, notes=all_notes(pair), names=names)
    if options.weights == "own":
        verdicts.append(equal_weights(pair))
    for mode in options.modes if verdicts[0].status == PASS else ():
        # frees one precision's runs before the next
        verdicts.extend(accepted.apply(compared.verdict) for compared in compare_mode(pair, mode == "train"))
    built, doubt = None, names.doubt
    is_proved = not accepted and _proves_the_map(joined("align", verdicts), options)
    if doubt and is_proved:
        pair.notes.append("the rest of the map is proved by the whole: outputs and all gradients agree in float64")
        doubt = []
        names.unsure.clear()
    if verdicts[0].status == PASS:
        built = compare_as_built(pair, options.factories, options.weights, is_proved)
        built = built and accepted.apply(built)
    if any(verdict.status == FAIL for verdict in verdicts):
        location = locate_failure(pair, verdicts, accepted=accepted)
    else:
        location = _place_of(pair, [built], "buffer", BUFFERS_AS_BUILT) if built is not None else None
    if location:
        verdicts = [without_faultless(pair, verdict, location.built_differently) for verdict in verdicts]
    every = joined("align", [verdicts[0], *([] if built is None else [built]), *map(_sectioned, verdicts[1:])])
    if every.status == PASS:
        doubt = doubt[:1]  # nothing is at fault
    found = every.rows, every.refusal, location, [*all_notes(pair), *accepted.notes()]
    caveats = [*every.caveats, *doubt[:1]]
    return AlignVerdict("align", *found, caveats=caveats, names=names, passes=passes(pair), doubt=doubt)


def _proves_the_map(verdict: Verdict, options: Options) -> bool:
    """Whether a whole that passed makes up for a map that values confirm only in part.

    All tensors were loaded by the map. If it paired two wrongly, outputs or gradients of the whole would differ in
    float64; two that may be exchanged without that, such as those of branches that are added, are right either way.
    """
    of_whole = [row.item for row in verdict.rows if row.item.dtype == "float64" and row.item.kind == "gradient"]
    return verdict.status == PASS and bool(of_whole) and not options.leave_out


def search(ref: Any, port: Any, inputs: Inputs, options: Options) -> tuple[Location | None, list[str]]:
    """(where the port departs in either mode, notes), without comparing the whole.

    Raises UserError as `judge` does, if it is refused in a mode, or if the map is ambiguous.
    """
    pair = Pair.prepared(ref, port, inputs, options)
    if pair.name_map.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.name_map.ambiguous}")
    for train in (False, True):
        refused = random_or_unclear(pair, train)
        if refused is not None and refused.refusal:
            raise UserError(refused.refusal)
    found = (locate_failure(pair, dtype=dtype) for dtype in pair.precisions)
    return next(filter(None, found), None), [*all_notes(pair), *pair.name_map.doubt]


def _sectioned(verdict: Verdict) -> Verdict:
    """Put the title over the items: all modes and precisions have the same names."""
    rows = []
    for row in verdict.rows:
        section = "/".join(filter(None, (verdict.title, row.item.section)))
        rows.append(replace(row, item=replace(row.item, section=section)))
    return replace(verdict, rows=rows)
