"""`portproof.judge_onnx`: a graph against a recording, in meaning, in the engine, and in what travels along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from portproof.arrays import largest
from portproof.backends.trace import OUTPUT
from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Row, Verdict, compare, joined, tensor_item
from portproof.exported.bounds import unreached
from portproof.exported.causes import causes_of
from portproof.exported.engine import in_engine, need_engine
from portproof.exported.folding import Origins
from portproof.exported.graph import Graph, NotEvaluated, graph_inputs
from portproof.exported.place import MOST_FAULTS, Fault, Search
from portproof.exported.preprocessing import compare_preprocessing
from portproof.exported.reference import Reference, bound
from portproof.exported.weights import difference, shares_weights
from portproof.ladder.pairs.whole import AlignVerdict, branch_caveats, branch_notes, not_proved
from portproof.localize.locate import Location, module_tree, numbers
from portproof.recording.file import RecordedModel
from portproof.report.text import grouped
from sturdyio.cli import UserError

TITLE = "judge"
MEANING = "eval mode, float64"
HERE: dict[str, Any] = {"mode": "eval", "dtype": "float64", "section": MEANING}
NO_MEANING = "what the graph means was not judged, the engine alone"
UNREACHED = "no input reaches this bound of the graph"
NO_OUTPUT = "it has no output of its own in the graph"
MOST_NODES = 6  # named in a report


def judge(
    path: str | Path,
    model: RecordedModel,
    preprocessing: str | Path | None = None,
    engine: bool = True,
    meaning: bool = True,
) -> AlignVerdict:
    """What `portproof.judge_onnx` does."""
    if engine:
        need_engine()
    inputs = graph_inputs(path)
    given = bound(inputs, model.inputs)
    misfits = {each.name: words for each in inputs if (words := each.problem(given[each.name]))}
    never_entered = model.never_entered(["eval"])
    notes = [*model.notes(), *branch_notes(model, never_entered)]
    verdicts: list[Verdict] = []
    if misfits:
        rows = [Row(Item(f"input {name}", "structure"), FAIL, reason=words) for name, words in misfits.items()]
        verdicts.append(Verdict("structure", rows))
    if not misfits and meaning:
        verdicts.append(_meaning(path, model, given))
    if not misfits and engine:
        verdicts.append(in_engine(path, inputs, model, alone=not meaning))
    if preprocessing is not None:
        verdicts.append(compare_preprocessing(preprocessing, model))
    every = joined(TITLE, verdicts)
    notes += [note for verdict in verdicts for note in verdict.notes]
    caveats = [*branch_caveats(never_entered), *every.caveats, *([] if meaning else [NO_MEANING])]
    return AlignVerdict(TITLE, every.rows, every.refusal, every.location, notes, every.hints, caveats)


def _meaning(path: str | Path, model: RecordedModel, given: Mapping[str, np.ndarray]) -> Verdict:
    ref = Reference(model)
    try:
        graph = Graph(path)
    except NotEvaluated as error:
        return _not_evaluated(error)
    if not shares_weights(graph.constants, ref):
        raise UserError("the graph holds other weights than the recording: record with --weights reference")
    graph.snap({float(array.flat[0]) for array in ref.weights.values() if array.size == 1})
    feeds = graph.feeds(given)
    origins = Origins.of(graph, ref)
    try:
        search = Search(graph, ref, feeds, origins.rounded, origins.lost)
        search.locate()
        search.judge_alone()
    except NotEvaluated as error:
        return _not_evaluated(error)
    rows = [*_weight_rows(graph, origins), *_rows(search), *_output_rows(search)]
    bounds = unreached(graph, feeds)
    search_notes = [
        *_notes(search, origins),
        *grouped("constants taken for what their float32 stands for, ", graph.snapped),
        *not_proved(UNREACHED, bounds),
    ]
    caveats = [f"{len(bounds)} bound{'s' if len(bounds) > 1 else ''} of the graph never reached"] if bounds else []
    return Verdict(MEANING, rows, location=_location(search), notes=search_notes, caveats=caveats)


def _not_evaluated(error: NotEvaluated) -> Verdict:
    reason = f"onnx cannot evaluate the graph, {error}: judge --engine-only tells what the engine makes of it"
    return Verdict(MEANING, [Row(Item("its modules", **HERE), REFUSED, reason=reason)])


def _weight_rows(graph: Graph, origins: Origins) -> Iterator[Row]:
    """One for each tensor that the graph nearly has, and not bit for bit, or not but for the rounding of folding."""
    for name, (weight, wanted) in origins.altered.items():
        item, own = tensor_item(weight.key, "weights", **HERE), graph.constants[name]
        row = compare({item: wanted.astype(np.float64)}, {item: own}, {item: 0.0}).rows[0]
        yield replace(row, reason=difference(weight, own, wanted))


def _rows(search: Search) -> Iterator[Row]:
    """One for each output of a module call, and for each fault in code between modules."""
    faulty = {id(fault.wanted): fault for fault in search.faults}
    at_fault = {fault.call for fault in search.faults}
    excused = search.excused()
    first = search.faults[0].call if search.faults else ""
    for output in search.ref.outputs:
        fault, match = faulty.get(id(output.array)), search.matches.get(id(output.array))
        row = Row(output.item, PASS, output.array.shape, scale=largest(output.array))
        if fault is not None and fault.values is not None and fault.call == output.call:
            yield _failed(output.item, fault, search)
        elif match is not None:
            yield replace(row, difference=match.difference, atol=match.atol)
        elif output.call in at_fault:
            yield replace(row, status=FAIL, reason="no tensor of the graph is it")
        elif output.call in excused:
            yield replace(row, status=NOT_JUDGED, reason=NO_OUTPUT)
        else:
            yield replace(row, status=NOT_JUDGED, reason=f"it follows from {first}, which is at fault")
    outputs = {id(each.array) for each in search.ref.outputs} | {id(array) for array in search.ref.run.output}
    for fault in search.faults:
        if id(fault.wanted) not in outputs and fault.values is not None:
            name = ", ".join(filter(None, (fault.call, fault.words)))
            yield _failed(Item(name, "output", search.ref.calls[fault.call].name, **HERE), fault, search)


def _failed(item: Item, fault: Fault, search: Search) -> Row:
    assert fault.values is not None
    found = compare(
        {item: fault.wanted}, {item: fault.values}, {item: fault.atol + search.moved.get(fault.tensor, 0.0)}
    )
    return found.rows[0]


def _output_rows(search: Search) -> list[Row]:
    """What the graph returns."""
    run, many = search.ref.run, len(search.ref.run.output) > 1
    items = [Item(OUTPUT + (place if many else ""), "output", **HERE) for place in run.places]
    names = search.graph.outputs
    ref = dict(zip(items, run.output))
    port = {item: search.first.outputs[name] for item, name in zip(items, names) if name in search.first.outputs}
    port |= {Item(name, "output", **HERE): search.first.outputs[name] for name in names[len(items) :]}
    moved = (search.first.moved.get(name, 0.0) for name in (*names, *[""] * len(items)))
    atol = {item: own + more for item, own, more in zip(items, search.ref.atol_of_outputs, moved)}
    return compare(ref, port, {**dict.fromkeys(port, 0.0), **atol}).rows


def _location(search: Search) -> Location | None:
    found = []
    for fault in search.faults[:MOST_FAULTS]:
        module = search.ref.model.modules[search.ref.calls[fault.call].name]
        phase, causes, nodes = causes_of(search, fault)
        row = _failed(Item(fault.call, "output", **HERE), fault, search) if fault.values is not None else None
        proof = [fault.words] if fault.words else []
        proof += numbers(row) if row else ["no tensor of the graph has values like its output"]
        if nodes:
            more = f" and {len(nodes) - MOST_NODES} more before" if len(nodes) > MOST_NODES else ""
            proof.append(f"in the graph: {', '.join(nodes[-MOST_NODES:])}{more}")
        tree = module_tree(search.ref.model, module.name)
        found.append(Location(module.name, module.type, phase, row=row, proof=proof, diagnosis=causes, tree=tree))
    return replace(found[0], also=found[1:]) if found else None


def _notes(search: Search, origins: Origins) -> Iterator[str]:
    matched = [each for each in search.ref.outputs if id(each.array) in search.matches]
    yield f"map: {len(matched)} of {len(search.ref.outputs)} outputs of modules found in the graph by their values"
    if not origins.folded:
        return
    pairs = [f"{weight.norm} in {weight.module}" for weight in origins.folded.values()]
    yield f"folded in float32, {len(set(pairs))} times, first {pairs[0]}"
    words = "none of the recorded tensors, taken for computed in float32"
    yield from grouped("", dict.fromkeys(origins.others, words))
    shares, names = [], dict[str, str]()
    labels = {id(each.array): each.label for each in matched}
    for label, call in search.ref.calls.items():
        for array in call.inputs:
            labels.setdefault(id(array), f"the code before {label}")
    for key, label in labels.items():
        match = search.matches.get(key)
        if match is not None and match.atol > search.wanted[key][1]:
            shares.append(match.atol / (largest(search.wanted[key][0]) or 1.0))
            names.setdefault(match.tensor, label)
    if shares:
        words = f"limits allow for what that rounds: a fault below {max(shares):.1e} of the largest value could hide"
        yield f"{words} in {', '.join(names.values())}"
