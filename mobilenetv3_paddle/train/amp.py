"""Mixed precision."""

from contextlib import AbstractContextManager, nullcontext

import paddle
from paddle import Tensor, nn

from reprod.recipe.cli import UserError


class Amp:
    """Forward passes in `dtype` where that is safe; with float16 a scaler, so that small gradients do not vanish.

    dtype None: everything in the precision that the model has, and a scaler that does nothing.
    Raises UserError for a dtype on the CPU.

    Paddle: its autocast does nothing on the CPU, with a warning; nor does its scaler.
    """

    def __init__(self, dtype: str | None = None, device: str = "cpu") -> None:
        if dtype and device == "cpu":
            raise UserError(f"--amp {dtype}: PaddlePaddle has no mixed precision on the CPU; use --device gpu")
        self.dtype = dtype
        self.scales = dtype == "float16"
        self.scaler = paddle.amp.GradScaler(enable=self.scales)

    def autocast(self) -> AbstractContextManager:
        """In this context layers take `dtype` where that is safe."""
        return paddle.amp.auto_cast(dtype=self.dtype) if self.dtype else nullcontext()

    def forward(self, model: nn.Layer, image: Tensor) -> Tensor:
        """The logits; float32 where the pass was mixed."""
        with self.autocast():
            output = model(image)
        return output.astype("float32") if self.dtype else output
