"""Training steps of the usual form, for a pair without a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from portproof.backends import backend

RATE = 0.01  # of plain SGD
Make = Callable[[Any], tuple]


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
