"""maintenance/checks/random_networks.py: its faithful pairs are faithful, and what `align` says of a pair is told."""

import json
from collections import Counter
from dataclasses import replace

import pytest

import portproof
from maintenance.checks import random_networks
from maintenance.checks.network_grammar import Pair, grown_pair
from maintenance.checks.network_grammar.spelling import BLOCKS
from maintenance.checks.network_grammar.tree import ACTIVATIONS, HEADS
from maintenance.checks.random_networks import built, fault_by, get_args_parser, judged, main, self_check, totals
from portproof.compare import ruler
from sturdyio.cli import UserError

# Some that must not get lost: of how the port is spelled otherwise, and of faults.
SPELLINGS = {
    *("linear: module -> raw", "linear: module -> weights", "activation: module -> function", "turned", "inline"),
    *("attention: fused -> apart", "gate: apart -> fused", "convolution: module -> bias apart", "reordered"),
    *("batch norm: library -> class", "batch norm: raw -> library", "layer norm: library -> raw"),
    *("rms norm: library -> raw", "transformer: library -> by hand", "recurrent: library -> by hand"),
    *("rotary: complex -> cosine", "table: saved buffer -> unsaved buffer", "table: unsaved buffer -> forward"),
    *("parameters: list -> apart", "heads: list -> apart", "blocks: Sequential -> list", "names: plain -> synonyms"),
    *("one level deeper", "sequence first", "arguments swapped", "spectral True", "clip: where -> clip"),
}
FAULTS = {
    *("epsilon", "momentum", "axis", "activation", "residual dropped", "q and k exchanged", "weight transposed"),
    *("weight without gradient", "detach in the wrong place", "detach missing", "scale missing", "constant"),
    *("slice off by one", "padding", "sum for mean", "bias unused", "order of concat", "straight-through missing"),
    *("gate without gradient", "axis of softmax", "mask inverted", "heads in the wrong order", "called once"),
}


@pytest.mark.parametrize("seed", range(16))
def test_a_faithful_pair_is_faithful(seed):
    assert self_check(seed) == ""


def test_a_pair_that_is_not_is_told(monkeypatch):
    pair = grown_pair(0)
    monkeypatch.setattr(random_networks, "grown_pair", lambda _seed: replace(pair, port=pair.faulty))
    assert "the faithful port differs by" in self_check(0)


def test_most_faults_change_what_is_computed():
    differences = [fault_by(grown_pair(seed), runs=3) for seed in range(8)]
    assert sum(difference > 1e-9 for difference in differences) >= 7, differences


def test_every_kind_is_grown():
    """Every block and head in 300 trees; the spellings and faults in more."""
    few, more = set(), set()
    for seed in range(1500):
        pair = grown_pair(seed)
        few |= pair.tree.kinds if seed < 300 else set()
        more |= pair.kinds | {kind for _, kind in pair.port.faults}
    wanted = {*BLOCKS, *HEADS, *(f"activation {name}" for name in ACTIVATIONS), "words", "vectors", "images"}
    assert not wanted - {"network"} - few
    assert not (SPELLINGS | FAULTS) - more


def test_a_seed_always_grows_the_same():
    first, second = grown_pair(3), grown_pair(3)
    assert (first.ref.source, first.faulty.source) == (second.ref.source, second.faulty.source)
    assert first.port.source != first.faulty.source


def test_an_alarm_of_the_kit_is_told(monkeypatch):
    """Its limits are put so low that rounding exceeds them."""
    pair = grown_pair(5)
    assert judged(pair, pair.port) == ("passed", "", False)
    for name in ("SEMANTIC_RTOL", "S", "K", "C"):
        monkeypatch.setattr(ruler, name, 0.0)
    said, words, _ = judged(pair, pair.port)
    assert said == "false alarm" and "located at" in words


def test_a_fault_that_the_kit_misses_is_told(monkeypatch):
    """It is given the faithful port in place of the faulty one."""
    pair = grown_pair(3)
    assert judged(pair, pair.faulty)[0] == "right place"

    def of_the_faithful(pair: Pair, _port: object, **_options: object) -> object:
        return portproof.align(built(pair.ref), built(pair.port), pair.tree.inputs())

    monkeypatch.setattr(random_networks, "align_quietly", of_the_faithful)
    assert judged(pair, pair.faulty)[0] == "missed"
    monkeypatch.setattr(random_networks, "fault_by", lambda _pair: 1e-13)
    assert judged(pair, pair.faulty)[0] == "no difference"


@pytest.mark.parametrize(("error", "said"), [(KeyError("weight"), "crash"), (UserError("no map"), "refused")])
def test_what_the_kit_raises_is_told(monkeypatch, error, said):
    def align(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(portproof, "align", align)
    pair = grown_pair(3)
    assert judged(pair, pair.port)[0] == said


@pytest.mark.parametrize(("seed", "faulty"), [(41020, "right place"), (41059, "right place")])
def test_what_no_value_says_is_answered(seed, faulty):
    """The second seed's fault is that the matrix that is asked for is used transposed."""
    pair = grown_pair(seed)
    assert judged(pair, pair.port) == ("passed", "", True)
    assert judged(pair, pair.faulty)[0] == faulty


def test_the_bounds():
    good = {"faithful": "passed", "faulty": "right place", "asked": False}

    def holds(count: int = 1, **other: object) -> bool:
        return totals([good] * 200 + [{**good, **other}] * count)[1]

    assert holds() and holds(faithful="refused") and holds(faulty="wrong place") and holds(faulty="no difference")
    for wrong in ({"faithful": "false alarm"}, {"faithful": "crash"}, {"faulty": "crash"}, {"faulty": "missed"}):
        assert not holds(**wrong), wrong
        assert totals([good] * 200 + [{**good, **wrong}], tolerated=1)[1]
        assert not totals([good] * 200 + [{**good, **wrong}] * 2, tolerated=1)[1]
    assert totals([good] * 200 + [{**good, "faithful": "crash", "faulty": "crash"}], tolerated=1)[1]  # of one seed
    assert not holds(20, faulty="wrong place")
    assert holds(10, asked=True) and not holds(20, asked=True)
    assert not holds(20, faithful="refused", faulty="not told")


def test_a_run_goes_on_where_another_ended(monkeypatch, tmp_path, capsys):
    run = Counter()

    def result(seed: int) -> dict:
        run[seed] += 1
        said = "false alarm" if seed == 9 else "passed"
        return {"seed": seed, "faithful": said, "words": "why", "faulty": "not told", "asked": False, "kinds": ["mlp"]}

    monkeypatch.setattr(random_networks, "judged_seed", result)
    output = tmp_path / "results.jsonl"
    assert main(get_args_parser().parse_args(["--first", "7", "--seeds", "2", "--output", str(output)])) == 0
    assert main(get_args_parser().parse_args(["--first", "7", "--seeds", "4", "--output", str(output)])) == 1
    assert run == {7: 1, 8: 1, 9: 1, 10: 1}
    assert [json.loads(line)["seed"] for line in output.read_text().splitlines()] == [7, 8, 9, 10]
    said = capsys.readouterr().out
    assert "seed 9: false alarm: why\n  of mlp\n" in said and "seeds 7 to 10" in said and "seed 8" not in said


def test_the_programs_of_a_seed_can_be_saved(tmp_path, capsys):
    assert not main(get_args_parser().parse_args(["--show", "3", "--save", str(tmp_path)]))
    assert "portproof align --ref reference:Net --port port:Net --inputs inputs.npz" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"reference.py", "port.py", "faulty.py", "inputs.npz"}
    assert not main(get_args_parser().parse_args(["--show", "3"]))
    assert (tmp_path / "faulty.py").read_text() in capsys.readouterr().out
    with pytest.raises(UserError, match="--save goes with --show"):
        main(get_args_parser().parse_args(["--save", str(tmp_path)]))
