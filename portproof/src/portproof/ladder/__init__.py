"""The rungs: each takes what two sides made of the same thing and says whether they agree.

    from portproof import ladder

    verdict = ladder.forward(ref, port, [images])
    print(verdict)

Every function returns a verdict whose `status` is 0 (equal within the limits), 1 (not) or 2 (that could not be told).
With `rung=Rung(NAME)` it puts what it found into that rung, which prints it and writes the result files.

Each raises UserError for arguments that it cannot take, and for what the reference's side raises or returns that is not
as promised. If the port's side does that, the rung fails.

Importing this imports neither PyTorch nor PaddlePaddle.
"""

from importlib import import_module
from typing import Any

from portproof.ladder import cases

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

__all__ = ["cases", *_MODULE_OF]  # noqa: PLE0604 - strings, which the check does not see


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
