"""What is random in a model: found by the random numbers that it takes, and switched off where its mode does that."""

from __future__ import annotations

from portproof.backends.model import Model
from portproof.backends.question import Question, Run
from portproof.backends.trace import Trace


def switch_off_random(model: Model, question: Question) -> tuple[Run, str | None]:
    """Have layers that take random numbers in train mode run as in eval mode.

    -> (the answer to `question`, which keeps calls; the module that is random all the same, None: none is). Such
    layers, without tensors and children, are DropPath and the like; plain dropout is off in any case. Two runs with
    other results would not tell, for with few samples a mask is often the same. The layers are in `model.switched_off`
    afterwards.
    """
    while True:
        run = model.ask(question)
        name = _random_module(run.trace)
        if name is None or not question.train or name in model.switched_off:
            return run, name
        if model.modules[name].slots or not model.modules[name].is_leaf:  # more in it depends on the mode
            return run, name
        model.switched_off.add(name)


def _random_module(trace: Trace) -> str | None:
    """The innermost module whose call took random numbers; None if none did."""
    calls = sorted(trace.calls.values(), key=lambda call: -call.start)
    taking = (call.name for call in calls if call.took_random)
    return next(taking, None)
