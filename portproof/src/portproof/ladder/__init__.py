"""The steps: each compares the same thing of the reference and the port, and returns a verdict.

    from portproof import ladder

    print(ladder.forward(ref, port, [images]))

A verdict's `status` is 0 (equal within the limits), 1 (not equal) or 2 (it could not be told). With `rung=Rung(NAME)`
that prints it and writes the result files. Bad arguments, and faults of the reference's side, raise UserError;
faults of the port's side fail the step. Importing this imports neither PyTorch nor PaddlePaddle.
"""

from typing import TYPE_CHECKING

from portproof.exports import on_use
from portproof.ladder import cases

if TYPE_CHECKING:
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
    from portproof.ladder.rungs.deployed import deploy
    from portproof.ladder.rungs.forward_pass import forward, gradients
    from portproof.ladder.rungs.fp64_runs import train_fp64
    from portproof.ladder.rungs.initial import Constant, Normal, Uniform, init
    from portproof.ladder.rungs.metrics import evaluation, loss, metric
    from portproof.ladder.rungs.optimizers import optimizer, schedule
    from portproof.ladder.rungs.processes import dist, strided_shares
    from portproof.ladder.rungs.ready_made import data_parallel_step, plain_steps, to_float64
    from portproof.ladder.rungs.resumed_runs import resume
    from portproof.ladder.rungs.runs import train
    from portproof.ladder.rungs.training_step import accumulation, backward, epoch
    from portproof.ladder.rungs.weights_files import weights_file
    from portproof.ladder.workers import join_group
else:
    __getattr__ = on_use(__name__)

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
    "data_parallel_step",
    "deploy",
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
    "resume",
    "run_all",
    "run_rung",
    "rung_parser",
    "same_weights",
    "schedule",
    "single_samples",
    "strided_shares",
    "to_fill_in",
    "to_float64",
    "train",
    "train_fp64",
    "weights_file",
]


def __dir__() -> list[str]:
    return __all__
