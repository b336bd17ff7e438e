"""For a pair without code of its own: a model in float64, training steps, and one of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from portproof.backends import backend, backend_of_model
from portproof.compare import Item, tensor_item
from portproof.ladder.workers import join_group, place
from sturdyio.cli import UserError

RATE = 0.01  # of plain SGD
Make = Callable[[Any], tuple]


def to_float64(model: Any, device: str = "cpu") -> Any:
    """The model, whose parameters and buffers of floats are made float64 in place, on "cpu" or "gpu"; returns it.

    Paddle's `Layer.to(dtype="float64")` and `astype` raise for a model with a GRU or an LSTM, and convert whole
    numbers, too; this does neither. Make the optimizer afterwards. Raises UserError for what is no model, and where
    there is no such device.
    """
    own = backend_of_model(model)
    return own.training.to_device(model, own.device(device), "float64")


def plain_steps(
    criterion: Sequence[Callable[..., Any]],
    optimizer: Sequence[Callable[[list], Any]] | None = None,
    *,
    inputs: int = 1,
    train: bool = True,
) -> tuple[Make, Make]:
    """(make_ref, make_port) for `backward`.

    A step clears the gradients, calls the model on the first `inputs` arrays of the batch, gives its output and the
    rest to the criterion, goes backward and updates; `train` sets train or eval mode. `criterion` is a pair of
    functions (output, *labels) -> loss, the reference's first; `optimizer` one of (list of parameters) -> optimizer,
    by default SGD with rate 0.01.
    """

    def make_of(side: int) -> Make:
        loss_of, framework = criterion[side], backend(("torch", "paddle")[side])
        optimizer_of = optimizer[side] if optimizer else lambda parameters: framework.training.sgd(parameters, RATE)

        def make(model: Any) -> tuple:
            trained = optimizer_of(list(model.parameters()))

            def step(*batch: Any) -> Any:
                model.train() if train else model.eval()
                framework.training.clear_gradients(trained)
                loss = loss_of(model(*batch[:inputs]), *batch[inputs:])
                loss.backward()
                trained.step()
                return loss

            return step, trained

        return make

    return make_of(0), make_of(1)


def data_parallel_step(
    model: Any, make: Callable[[Any], Sequence], batch: Sequence[Any], dtype: str
) -> dict[Item, Any]:
    """What `dist` compares, of one training step of this process, alone or one of several.

    `make(model)` returns (step, optimizer, ...), as for `backward`. `batch` holds tensors or arrays; process r of n
    takes every n-th sample of each from the r-th on. Several processes exchange gradients over gloo, by the framework's
    own data parallel model, which `make` then gets. The model runs in eval mode, whatever the step sets: each process
    would draw its own dropout, and normalize by its own share. `dtype` is "float32" or "float64".

    Raises UserError where the processes would not get equally many samples.
    """
    own, (rank, size) = backend_of_model(model), place()
    if size > 1:
        join_group(own.training.join, own.training.leave)
    device = own.device("cpu")
    model = own.training.to_device(model, device, dtype)
    own.runs.hook_before(model, lambda module, args, kwargs: own.runs.set_mode(module, False))
    arrays = [array if isinstance(array, np.ndarray) else own.to_array(array) for array in batch]
    samples = np.arange(len(arrays[0]))
    if len(samples) % size:
        raise UserError(f"{size} processes cannot share a batch of {len(samples)} samples equally: give another batch")
    share = [own.tensor(array[rank::size], device, dtype) for array in arrays]
    with own.runs.exact_constants() if dtype == "float64" else nullcontext(), own.runs.new_tensors(dtype):
        step, *_ = make(own.training.data_parallel(model) if size > 1 else model)
        loss = step(*share)
    found: dict[Item, Any] = {
        Item("samples", "images"): samples[rank::size],
        Item("loss", "own loss"): own.to_array(loss),
    }
    tensors = own.arrays_of(model)
    for kind, named in {"gradient": tensors.gradients(), "parameter": tensors.parameters()}.items():
        found |= {tensor_item(name, kind): array for name, array in named.items()}
    return found
