"""The rungs: each takes what two sides made of the same thing and says whether they agree.

    from portproof import ladder

    verdict = ladder.forward(ref, port, [images])
    print(verdict)

Every function returns a verdict whose `status` is 0 (equal within the limits), 1 (not) or 2 (that could not be told).
With `rung=Rung(NAME)` it puts what it found into that rung, which prints it and writes the result files.

Importing this imports neither PyTorch nor PaddlePaddle.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portproof.ladder import cases
    from portproof.ladder.all_rungs import Planned, run_all
    from portproof.ladder.pairs.named import draw_inputs, model_factory
    from portproof.ladder.pairs.pair import same_weights
    from portproof.ladder.rung import Rung, run_rung, rung_parser, to_fill_in
    from portproof.ladder.rungs.batches import (
        by_sample,
        covering,
        data,
        facts,
        image_folder,
        loaders,
        must_vary,
        single_samples,
    )
    from portproof.ladder.rungs.forward_pass import forward, gradients
    from portproof.ladder.rungs.fp64_runs import train_fp64
    from portproof.ladder.rungs.initial import Constant, Normal, Uniform, init
    from portproof.ladder.rungs.losses import loss
    from portproof.ladder.rungs.metrics import evaluation, metric
    from portproof.ladder.rungs.optimizers import optimizer, schedule
    from portproof.ladder.rungs.plain_steps import plain_steps
    from portproof.ladder.rungs.processes import dist, strided_shares
    from portproof.ladder.rungs.runs import train
    from portproof.ladder.rungs.training_step import accumulation, backward, epoch
    from portproof.ladder.workers.process_worker import join_group

# The module that each name comes from, which is imported when the name is used.
_MODULES = {
    "all_rungs": ("Planned", "run_all"),
    "pairs.named": ("draw_inputs", "model_factory"),
    "pairs.pair": ("same_weights",),
    "rung": ("Rung", "run_rung", "rung_parser", "to_fill_in"),
    "rungs.batches": (
        "by_sample",
        "covering",
        "data",
        "facts",
        "image_folder",
        "loaders",
        "must_vary",
        "single_samples",
    ),
    "rungs.forward_pass": ("forward", "gradients"),
    "rungs.fp64_runs": ("train_fp64",),
    "rungs.initial": ("Constant", "Normal", "Uniform", "init"),
    "rungs.losses": ("loss",),
    "rungs.metrics": ("evaluation", "metric"),
    "rungs.optimizers": ("optimizer", "schedule"),
    "rungs.plain_steps": ("plain_steps",),
    "rungs.processes": ("dist", "strided_shares"),
    "rungs.runs": ("train",),
    "rungs.training_step": ("accumulation", "backward", "epoch"),
    "workers.process_worker": ("join_group",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Constant",
    "Normal",
    "Planned",
    "Rung",
    "Uniform",
    "accumulation",
    "backward",
    "by_sample",
    "cases",
    "covering",
    "data",
    "dist",
    "draw_inputs",
    "epoch",
    "evaluation",
    "facts",
    "forward",
    "gradients",
    "image_folder",
    "init",
    "join_group",
    "loaders",
    "loss",
    "metric",
    "model_factory",
    "must_vary",
    "optimizer",
    "plain_steps",
    "run_all",
    "run_rung",
    "rung_parser",
    "same_weights",
    "schedule",
    "single_samples",
    "strided_shares",
    "to_fill_in",
    "train",
    "train_fp64",
]


def __getattr__(name: str) -> Any:
    if name == "cases":
        return import_module("portproof.ladder.cases")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
