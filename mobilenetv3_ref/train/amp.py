"""Mixed precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn


class Amp:
    """Forward passes in `dtype` where that is safe; with float16 a scaler, so that small gradients do not vanish.

    dtype None: everything in the precision that the model has, and a scaler that does nothing.
    """

    def __init__(self, dtype: Literal["float16", "bfloat16"] | None = None, device: torch.device | str = "cpu") -> None:
        self.dtype = getattr(torch, dtype) if dtype else None
        self.device_type = torch.device(device).type
        self.scales = dtype == "float16"
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=self.scales)

    def autocast(self) -> AbstractContextManager:
        """In this context layers take `dtype` where that is safe."""
        return torch.autocast(self.device_type, self.dtype) if self.dtype else nullcontext()

    def forward(self, model: nn.Module, image: Tensor) -> Tensor:
        """The logits; float32 where the pass was mixed."""
        with self.autocast():
            output = model(image)
        return output.float() if self.dtype else output
