"""Grow random small networks as pairs, faithful and with one fault, and see whether `portproof.align` says so.

  python maintenance/checks/random_networks.py --seeds 200                      with seeds that no run had before
  python maintenance/checks/random_networks.py --seeds 9000 --first 0 --output results.jsonl    can be resumed
  python maintenance/checks/random_networks.py --show 7                         prints the programs of a seed
  python maintenance/checks/random_networks.py --self-check --seeds 300         judges the grammar alone

A grammar (network_grammar/) makes a tree of each seed and writes it as a PyTorch program and as a PaddlePaddle one,
in different styles, and once more with one fault. A fault that `align` passes counts as missed unless float64 runs of
both ports on 100 inputs, made here, are equal up to 1e-12. The right place is the reference's module in which the fault
is, or one around it, up to the first that the port has too. A square matrix that both sides hold raw may be stored
transposed in the port, or used so by mistake, and no value says which: where `align` asks, it is told, and judges
again. Where it proves that a faithful port fails by a kernel of the framework, that is no false alarm. With
--self-check the tree's own knowledge says which tensor is which, and both sides must agree in float64, outputs,
gradients and statistics; the faulty port need not.

Exit status: 0 no crash, no false alarm, at most 1 in 100 refused and 5 asked, every fault noticed and 95 in 100 at the
right place; 1 not; a line for each seed that shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import os
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from maintenance.checks.network_grammar import Pair, Program, grown_pair
from portproof.io.process import use_threads
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, one_line, positive_int, run, seed

PROG = "random_networks"
EQUAL, ROUNDED, NO_DIFFERENCE = 1e-10, 1e-5, 1e-12
RUNS = 100  # in which a fault that is passed must show
REFUSED_SHARE, ASKED_SHARE, PLACED_SHARE = 0.01, 0.05, 0.95
ASKED = re.compile(r"values agree only with (\S+), which is square, transposed: .* or \1: (\S+) \(transposed\)")
STATISTICS = (".mean", ".variance", ".unit_u", ".unit_v")
FRAMEWORKS = "the framework's operation differs"  # what `align` says of a fault that is none of the port's
BAD = {"crash", "false alarm", "missed"}
GOOD = ("passed", "framework's fault", "right place", "no difference", "not told")


def built(program: Program) -> Any:
    """The network of a program, with the same first weights each time."""
    import paddle
    import torch

    name = f"<random network in {program.side.name}>"
    linecache.cache[name] = (len(program.source), None, program.source.splitlines(True), name)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(program.source, name, "exec"), names)
    torch.manual_seed(program.tree.seed)
    paddle.seed(program.tree.seed)
    return names["Net"]()


# The grammar itself


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Models are made in it, and PaddlePaddle's kernels have no constants in float32."""
    import paddle
    import torch

    from portproof.backends.fp64_paddle import exact_constants

    torch.set_default_dtype(torch.float64)
    paddle.set_default_dtype("float64")
    try:
        with exact_constants():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        paddle.set_default_dtype("float32")


def canonical_weights(program: Program, number: int = 0) -> dict[str, np.ndarray]:
    """What the tensors of all sides are made of, by name."""
    shapes = {name: shape for held in program.tensors.values() for name, shape in held.parts}
    rng = np.random.default_rng([program.tree.seed, 21, number])
    found = {}
    for name, shape in sorted(shapes.items()):
        array = rng.normal(size=shape) * 0.7
        if name.endswith("variance"):
            array = np.abs(array) + 0.5
        elif ".unit_" in name:
            array /= np.linalg.norm(array)
        found[name] = array
    return found


def results_of(
    program: Program, arrays: dict[str, np.ndarray], inputs: dict[str, np.ndarray], train: bool
) -> dict[str, np.ndarray]:
    """{what: its outputs, gradients and statistics}, by canonical names, in float64 with these weights."""
    if program.side.torch:
        import torch as framework

        to_tensor = framework.from_numpy
    else:
        import paddle as framework

        to_tensor = framework.to_tensor
    with in_float64():
        model, found = built(program), {}
        state = dict(model.state_dict())
        for key, held in program.tensors.items():
            value = np.ascontiguousarray(held.pack(arrays))
            if program.side.torch:
                with framework.no_grad():
                    state[key].copy_(to_tensor(value))
            else:
                state[key].set_value(value)
        model.train() if train else model.eval()
        if not program.side.torch:  # its recurrent layers have no gradients in eval mode, and here no dropout
            for layer in model.sublayers():
                if isinstance(layer, (framework.nn.GRU, framework.nn.LSTM)):
                    layer.train()
        given = {}
        for name, raw in inputs.items():
            array = raw.astype(np.float64) if raw.dtype == np.float32 else raw
            given[name] = to_tensor(array)
            if array.dtype == np.float64:
                given[name].requires_grad = True
        outputs = model(**given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total, rng = 0.0, np.random.default_rng([program.tree.seed, 22])
        for i, output in enumerate(outputs):
            upstream = np.asarray(rng.normal(size=tuple(output.shape)))
            total = total + (output * to_tensor(upstream)).sum()
            found[f"output {i}"] = output.detach().numpy()
        total.backward()
        for name, tensor in given.items():
            if tensor.grad is not None:
                found[f"gradient {name}"] = np.asarray(tensor.grad.numpy())
        parameters = dict(model.named_parameters())
        for key, held in program.tensors.items():
            if not held.parts[0][0].endswith(STATISTICS):
                if key not in parameters:  # tied
                    continue
                gradient = parameters[key].grad
                array = np.zeros(tuple(parameters[key].shape)) if gradient is None else gradient.numpy()
                found |= {f"gradient {name}": part for name, part in held.unpack(array).items()}
            else:
                found |= {f"buffer {name}": part for name, part in held.unpack(state[key].detach().numpy()).items()}
    return found


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[float, str]:
    """(the largest, relative to the largest number of its kind, of what)."""
    worst, scales = (0.0, ""), Counter()
    for what, array in (*one.items(), *other.items()):
        kind = what.split()[0]
        scales[kind] = max(scales[kind], float(np.abs(array).max()))
    for what in sorted(one.keys() | other.keys()):
        largest = float(np.abs(one.get(what, 0.0) - other.get(what, 0.0)).max())
        if not np.isfinite(largest):
            return float("inf"), what
        worst = max(worst, (largest / max(scales[what.split()[0]], 1e-300), what))
    return worst


def modes_of(pair: Pair) -> tuple[bool, ...]:
    """In which it can be run twice with the same results; True is train."""
    return (False,) if pair.tree.random else (False, True)


def faithful_by(pair: Pair) -> tuple[float, str]:
    """By how much the faithful port differs from the reference in float64, at most."""
    arrays, inputs = canonical_weights(pair.ref), pair.tree.inputs()
    found = []
    for train in modes_of(pair):
        found.append(difference(*(results_of(one, arrays, inputs, train) for one in (pair.ref, pair.port))))
    return max(found)


def fault_by(pair: Pair, runs: int = RUNS) -> float:
    """By how much the faulty port differs from the faithful one, at most."""
    worst = 0.0
    for number in range(runs):
        arrays, inputs = canonical_weights(pair.port, number), pair.tree.inputs(number)
        for train in modes_of(pair):
            both = (results_of(one, arrays, inputs, train) for one in (pair.port, pair.faulty))
            worst = max(worst, difference(*both)[0])
        if worst >= NO_DIFFERENCE:
            break
    return worst


def self_check(seed: int) -> str:
    """What is wrong with the grammar at this seed, or nothing."""
    pair = grown_pair(seed)
    if set(canonical_weights(pair.ref)) != set(canonical_weights(pair.port)):
        return "the sides hold other tensors"
    if pair.faulty.tensors != pair.port.tensors:
        return f"the faulty port is spelled otherwise: {pair.fault}"
    worst, what = faithful_by(pair)
    if not worst < (ROUNDED if pair.tree.rounded else EQUAL):
        return f"the faithful port differs by {worst:.1e} in {what}"
    return ""


# Judging


def align_quietly(pair: Pair, port: Program, **options: Any) -> Any:
    import portproof

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return portproof.align(built(pair.ref), built(port), pair.tree.inputs(), **options)


def align_answered(pair: Pair, port: Program) -> tuple[Any, dict[str, str]]:
    """(the verdict, the lines of a map that it asked for)."""
    lines: dict[str, str] = {}
    options: dict[str, Any] = {}
    while True:
        verdict = align_quietly(pair, port, **options)
        asked = ASKED.search(verdict.refusal or "")
        if asked and asked[1] not in lines:
            sides = pair.ref.tensors[asked[1]], port.tensors[asked[2]]
            lines[asked[1]] = asked[2] + " (transposed)" * (sides[0].turned != sides[1].turned)
            options["names"] = lines
        elif verdict.refusal and pair.tree.random and "modes" not in options:  # judged as the refusal advises
            options["modes"] = ("eval",)
        else:
            return verdict, lines


def judged(pair: Pair, port: Program) -> tuple[str, str, bool]:
    """(class, words, whether it asked) of what `align` says of the faithful or the faulty port."""
    from portproof.compare import FAIL, PASS, REFUSED

    faulty = port is pair.faulty
    try:
        verdict, lines = align_answered(pair, port)
    except UserError as error:
        return "refused", str(error), False
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "crash", f"{one_line(error)} ({Path(frame.filename).name}:{frame.lineno})", False
    first = verdict.first_failure
    said = f"{first.name}: {first.reason or f'{first.difference:.1e}'}" if first else verdict.refusal or ""
    if verdict.status == REFUSED:
        return "refused", verdict.refusal or said, bool(lines)
    if verdict.status == FAIL:
        location = verdict.location
        name = location.name if location else None
        words = f"{'not located' if name is None else f'located at {name!r} ({location.phase})'}; {said}"
        if not faulty:
            is_told = location and any(line.startswith(FRAMEWORKS) for line in location.proof)
            return "framework's fault" if is_told else "false alarm", words, bool(lines)
        right = pair.right_places
        if name in right:
            return "right place", words, bool(lines)
        return "wrong place", f"{words}; right is {right}", bool(lines)
    assert verdict.status == PASS
    if not faulty:
        return "passed", "", bool(lines)
    worst = fault_by(pair)
    said = ("no difference", "") if worst < NO_DIFFERENCE else ("missed", f"it differs by {worst:.1e}")
    return *said, bool(lines)


def judged_seed(seed: int) -> dict[str, Any]:
    """The line of a seed."""
    pair = grown_pair(seed)
    faithful, said, asked = judged(pair, pair.port)
    faulty, said_of_faulty, _ = judged(pair, pair.faulty)
    if faithful != "passed" and faulty != "crash":  # which hides what is said of the fault
        faulty = "not told"
    return {
        "seed": seed,
        "faithful": faithful,
        "words": said,
        "asked": asked,
        "fault": pair.fault[1],
        "site": pair.fault[0],
        "faulty": faulty,
        "faulty_words": said_of_faulty,
        "kinds": sorted(pair.kinds),
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """What is not right at a seed."""
    found = []
    if result["faithful"] not in GOOD:
        found.append(f"seed {result['seed']}: {result['faithful']}: {result['words']:.300}")
    if result["faulty"] not in GOOD:
        fault = f"{result['fault']} at {result['site']}"
        found.append(f"seed {result['seed']}: {fault}: {result['faulty']}: {result['faulty_words']:.300}")
    return [*found, f"  of {', '.join(result['kinds'])}"] if found else []


def totals(results: Iterable[dict[str, Any]], tolerated: int = 0) -> tuple[list[str], bool]:
    """(lines, whether all bounds hold, but for so many seeds at which the proof is at fault)"""
    results = list(results)
    faithful, faulty = (Counter(result[side] for result in results) for side in ("faithful", "faulty"))
    lines = [f"{len(results)} seeds"]
    for name, counts in (("faithful", faithful), ("faulty", faulty)):
        lines.append(f"  {name}: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}")
    asked = sum(result["asked"] for result in results)
    lines.append(f"  asked for a line of a map: {asked}")
    noticed = faulty["right place"] + faulty["wrong place"]
    good = sum(bool(BAD & {result["faithful"], result["faulty"]}) for result in results) <= tolerated
    good &= faithful["refused"] + faulty["refused"] <= REFUSED_SHARE * 2 * len(results)
    good &= asked <= ASKED_SHARE * len(results)
    good &= faulty["right place"] >= PLACED_SHARE * noticed
    return lines, good


def shown(seed: int, folder: Path | None) -> None:
    """Print the programs of a seed, or write them to a folder."""
    pair = grown_pair(seed)
    programs = {"reference": pair.ref, "port": pair.port, "faulty": pair.faulty}
    print(pair.tree, f"fault: {pair.fault[1]} at {pair.fault[0]}; right places: {pair.right_places}", sep="\n")
    for name, program in programs.items():
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(program.source, encoding="utf-8")
        else:
            print(f"\n# {name}.py\n{program.source}")
    if folder:
        np.savez(folder / "inputs.npz", **pair.tree.inputs())
        print(f"cd {folder} && portproof align --ref reference:Net --port port:Net --inputs inputs.npz")


def results(seeds: list[int], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs == 1:
        yield from map(judged_seed, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judged_seed, seeds)


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--seeds", type=positive_int, default=200, metavar="N", help="how many")
    add("--first", type=seed, metavar="K", help="the first seed; the others follow (drawn, and printed)")
    add("--output", type=Path, metavar="FILE", help="add a line of JSON for each seed; seeds that it has are not run")
    add("--jobs", type=positive_int, default=1, help="processes")
    add("--tolerated", type=positive_int, metavar="N", help="pass with up to N seeds that crash, alarm or hide a fault")
    add("--show", type=seed, metavar="SEED", help="print the programs of this seed, and judge nothing")
    add("--save", type=Path, metavar="FOLDER", help="with --show: write them there, with their inputs")
    add("--self-check", action="store_true", help="see whether the grammar's faithful pairs are faithful")
    return parser


def main(args: argparse.Namespace) -> int:
    if args.show is not None:
        return shown(args.show, args.save)
    if args.save:
        raise UserError("--save goes with --show: say of which seed")
    use_threads(None)
    os.environ.setdefault("GLOG_minloglevel", "2")  # PaddlePaddle's warnings of types, each time
    first = random.SystemRandom().randrange(2**31) if args.first is None else args.first
    seeds = list(range(first, first + args.seeds))
    print(f"seeds {first} to {seeds[-1]}", flush=True)
    if args.self_check:
        wrong = [f"seed {seed}: {said}" for seed in tqdm(seeds, "seeds", disable=None) if (said := self_check(seed))]
        print(*wrong, f"{'FAIL' if wrong else 'PASS'} {PROG}: {len(wrong)} of {len(seeds)} seeds", sep="\n")
        return int(bool(wrong))
    found = {}
    if args.output and args.output.exists():
        lines = args.output.read_text(encoding="utf-8").splitlines()
        found = {result["seed"]: result for result in map(json.loads, lines)}
    waiting = [seed for seed in seeds if seed not in found]
    for result in tqdm(results(waiting, args.jobs), "seeds", len(waiting), disable=None):
        found[result["seed"]] = result
        for line in lines_of(result):
            tqdm.write(line)
        if args.output:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    lines, good = totals((found[seed] for seed in seeds), args.tolerated or 0)
    print(*lines, f"{'PASS' if good else 'FAIL'} {PROG}", sep="\n")
    return int(not good)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
