"""A model of any framework in float64, for the runs in which rounding must hide nothing."""

from __future__ import annotations

from typing import Any

from portproof.backends import backend_of_model


def to_float64(model: Any, device: str = "cpu") -> Any:
    """The model, whose parameters and buffers of floats are made float64 in place, on "cpu" or "gpu"; returns it.

    Paddle's `Layer.to(dtype="float64")` and `astype` raise for a model with a GRU or an LSTM, and convert whole
    numbers, too; this does neither. Make the optimizer afterwards. Raises UserError for what is no model, and where
    there is no such device.
    """
    own = backend_of_model(model)
    return own.training.to_device(model, own.device(device), "float64")
