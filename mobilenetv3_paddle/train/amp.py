"""Mixed precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import paddle
from paddle import Tensor, nn


class Amp:
    """Forward passes in `dtype` where that is safe; with float16 a scaler, so that small gradients do not vanish.

    dtype None: everything in the precision that the model has, and a scaler that does nothing.
    """

    def __init__(self, dtype: Literal["float16", "bfloat16"] | None = None, device: str = "cpu") -> None:
        self.dtype = dtype  # Paddle: a name, and the device is a global setting
        self.scales = dtype == "float16"
        self.scaler = paddle.amp.GradScaler(enable=self.scales)  # Paddle: `enable`, and for the global device

    def autocast(self) -> AbstractContextManager:
        """In this context layers take `dtype` where that is safe."""
        return paddle.amp.auto_cast(dtype=self.dtype) if self.dtype else nullcontext()  # Paddle: for the global device

    def forward(self, model: nn.Layer, image: Tensor) -> Tensor:
        """The logits; float32 where the pass was mixed."""
        with self.autocast():
            output = model(image)
        return output.astype("float32") if self.dtype else output  # Paddle: has no Tensor.float
