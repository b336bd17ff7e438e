"""The rungs: each compares the same thing of the reference and the port, and returns a verdict.

    from portproof import ladder

    print(ladder.forward(ref, port, [images]))

A verdict's `status` is 0 (equal within the limits), 1 (not equal) or 2 (it could not be told). With `rung=Rung(NAME)`
that rung prints it and writes the result files. Bad arguments, and faults of the reference's side, raise UserError;
faults of the port's side fail the rung. Importing this imports neither PyTorch nor PaddlePaddle.
"""

from importlib import import_module
from typing import Any

from portproof.ladder import cases

# {module: its names}; imported when a name is used.
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
    "rungs.deployed": ("deploy",),
    "rungs.fp64_runs": ("train_fp64",),
    "precision": ("to_float64",),
    "rungs.initial": ("Constant", "Normal", "Uniform", "init"),
    "rungs.metrics": ("evaluation", "loss", "metric"),
    "rungs.optimizers": ("optimizer", "schedule"),
    "rungs.parallel_step": ("data_parallel_step",),
    "rungs.plain_steps": ("plain_steps",),
    "rungs.processes": ("dist", "strided_shares"),
    "rungs.resumed_runs": ("resume",),
    "rungs.runs": ("train",),
    "rungs.training_step": ("accumulation", "backward", "epoch"),
    "rungs.weights_files": ("weights_file",),
    "workers": ("join_group",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["cases", *_MODULE_OF]  # noqa: PLE0604 - strings, which the check does not see


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
