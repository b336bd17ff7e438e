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
    from portproof.ladder.batches import by_sample, covering, data, facts, must_vary
    from portproof.ladder.forward_pass import forward, gradients
    from portproof.ladder.fp64_runs import train_fp64
    from portproof.ladder.initial import Constant, Normal, Uniform, init
    from portproof.ladder.losses import loss
    from portproof.ladder.metrics import evaluation, metric
    from portproof.ladder.named import draw_inputs, model_factory
    from portproof.ladder.optimizers import optimizer, schedule
    from portproof.ladder.pair import same_weights
    from portproof.ladder.process_worker import join_group
    from portproof.ladder.processes import dist
    from portproof.ladder.rung import Rung, run_rung, rung_parser, to_fill_in
    from portproof.ladder.runs import train
    from portproof.ladder.training_step import accumulation, backward, epoch

# The module that each name comes from, which is imported when the name is used.
_MODULES = {
    "all_rungs": ("Planned", "run_all"),
    "batches": ("by_sample", "covering", "data", "facts", "must_vary"),
    "forward_pass": ("forward", "gradients"),
    "fp64_runs": ("train_fp64",),
    "initial": ("Constant", "Normal", "Uniform", "init"),
    "losses": ("loss",),
    "metrics": ("evaluation", "metric"),
    "named": ("draw_inputs", "model_factory"),
    "optimizers": ("optimizer", "schedule"),
    "pair": ("same_weights",),
    "process_worker": ("join_group",),
    "processes": ("dist",),
    "rung": ("Rung", "run_rung", "rung_parser", "to_fill_in"),
    "runs": ("train",),
    "training_step": ("accumulation", "backward", "epoch"),
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
    "init",
    "join_group",
    "loss",
    "metric",
    "model_factory",
    "must_vary",
    "optimizer",
    "run_all",
    "run_rung",
    "rung_parser",
    "same_weights",
    "schedule",
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
