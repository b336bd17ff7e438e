"""Resumed runs: what a port forgets to save or restore is named, and a reference that forgets it is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import paddle
import pytest
import torch

from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder import resume
from portproof.ladder.rung import RungVerdict
from portproof.ladder.rungs import resumed_runs
from portproof.ladder.rungs.trainers import part_of_run
from portproof.ladder.workers import Outcome, record_of
from sturdyio.cli import UserError, one_line

STEPS = 10  # saved after 5, one into the second epoch


def toy(**options: Any) -> RungVerdict:
    return resume(
        "toy_trainers:ref", "toy_trainers:port", options=options, seed=3, steps=STEPS, names=options.get("names")
    )


@pytest.fixture
def here(monkeypatch) -> Iterator[None]:
    """All runs in this process, which has imported the frameworks, and begins each time as a new one."""

    def launch(paths: Mapping[str, str], calls: Mapping[str, Mapping], folder: Path) -> dict[str, Outcome]:
        done = {}
        for side in paths:
            try:
                random.seed()
                with paddle.utils.unique_name.guard():  # PaddlePaddle counts parameters from 0 again
                    found = {name: record_of(part_of_run, **kwargs) for name, kwargs in calls[side].items()}
            except Exception as error:
                done[side] = Outcome([], one_line(error))
                continue
            done[side] = Outcome([{name: {i.name: a for i, a in it.items()} for name, it in found.items()}])
        return done

    monkeypatch.setattr(resumed_runs, "launch_runs", launch)
    with torch.random.fork_rng():
        yield


@pytest.mark.thorough("in this process", but="here")
@pytest.mark.parametrize("where", ["here", "processes"])
def test_a_faultless_pair_passes(where, request):
    if where == "here":
        request.getfixturevalue("here")
    verdict = toy()
    assert verdict.status == PASS, str(verdict)
    kinds = {row.item.kind for row in verdict.rows}
    assert kinds == {"seed", "sampler", "random", "mode", "schedule", "lr", "optimizer", "parameter", "buffer", "loss"}
    text = str(verdict)
    assert "port, resumed after 5 of 10 steps (as the port) against its run in one go (as the reference)" in text
    assert "train mode, float64, 10 steps, the port resumed after 5, the reference in one go" in text
    assert "not compared" not in text and "not shown" not in text
    losses = [row.shape for row in verdict.rows if row.name == "loss"]
    assert losses == [(5,), (5,), (10,)]


@pytest.mark.thorough("test_what_a_port_does_not_restore_is_named")
def test_what_is_kept_in_the_process_and_not_in_the_file_is_found():
    verdict = toy(fault="empty file")
    assert verdict.status == FAIL and "KeyError" in str(verdict)


@pytest.mark.parametrize(
    ("fault", "item"),
    [
        ("optimizer", "after loading/optimizer/one.weight[velocity]"),
        ("schedule", "after loading/schedule/[last_epoch]"),
        ("sampler", "sampler/model inputs"),
        ("mode", "after loading/mode/model"),
        ("random", "random/framework"),
        ("buffer", "after loading/mean"),
        ("no seen", "sampler/sum of indices"),
    ],
)
def test_what_a_port_does_not_restore_is_named(here, fault, item):
    verdict = toy(fault=fault)
    assert verdict.status == FAIL
    assert verdict.first_failure.name == item, str(verdict)
    assert "random/Python" not in {row.name for row in verdict.rows}  # which no process seeds


def test_a_port_that_trains_otherwise_fails_between_the_sides_alone(here):
    verdict = toy(fault="rate")
    assert {row.item.kind for row in verdict.bad} == {"lr", "parameter", "loss"}, str(verdict)
    assert all(row.item.dtype == "float64" for row in verdict.bad)


def test_a_port_that_raises_fails(here):
    verdict = toy(fault="raises")
    assert verdict.status == FAIL and verdict.first_failure.reason == "ValueError: no such numbers"


@pytest.mark.parametrize(
    ("fault", "item", "cause"),
    [
        ("optimizer", "after loading/optimizer/one.weight[momentum_buffer]", "not saved, or not loaded"),
        ("schedule", "after loading/schedule/[last_epoch]", "the schedule's state not saved"),
        ("random", "random/framework", "the generators' states not saved"),
        ("unseeded", "before saving/loss", "draws that do not come from `seed`"),
    ],
)
def test_a_reference_that_is_not_itself_again_is_refused(here, fault, item, cause):
    verdict = toy(ref_fault=fault)
    assert verdict.status == REFUSED
    assert f"the reference is not itself again, first {item}" in verdict.refusal and cause in verdict.refusal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ref_fault": "losses"}, r"train\(5\) returned losses of shape \(4,\), not \(5,\)"),
        ({"ref_fault": "no model"}, "no attribute 'model'"),
        ({"ref_fault": "float32"}, "is float32: train its model in float64"),
        ({"rate": 0.0}, "move no parameter"),
    ],
)
def test_a_mistake_of_the_reference_is_named(here, options, message):
    with pytest.raises(UserError, match=message):
        toy(**options)


def test_names_that_differ_are_given(here):
    assert toy(first="uno", names={"one": "uno"}).status == PASS
    assert toy(first="uno").first_failure.name == "parameter/one.weight"


def test_what_a_new_run_has_too_is_said(here):
    """Saved in the first epoch, before the schedule was ever stepped."""
    verdict = resume("toy_trainers:ref", "toy_trainers:port", seed=3, steps=6)
    assert verdict.status == PASS
    assert "not shown, since a new run has the same after 3 steps: schedule; take more steps" in str(verdict)


def test_a_single_step_cannot_be_resumed():
    with pytest.raises(UserError, match="steps 1: 2 or more"):
        resume("toy_trainers:ref", "toy_trainers:port", steps=1)
