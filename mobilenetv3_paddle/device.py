"""Where tensors live, and what makes a run repeatable."""

import paddle

from mobilenetv3_common.versions import check_version
from sturdyio.cli import UserError


def select_device(name: str, index: int = 0) -> str:
    """The CPU or the card `index`; raises UserError when there is none, or the framework is too old."""
    check_version(paddle, "3.2")  # Paddle: the first with paddle.nn.init
    if name == "cpu":
        paddle.set_device("cpu")  # Paddle: the device is a global setting
        return "cpu"
    count = paddle.device.cuda.device_count()
    if count == 0:
        # Paddle: the CUDA build is another package
        raise UserError("--device gpu: this PaddlePaddle sees no card; use --device cpu or install paddlepaddle-gpu")
    if index >= count:
        raise UserError(f"--device gpu: process {index} has no card; start {count} processes")
    paddle.set_device(f"gpu:{index}")  # Paddle: a device is its name
    return f"gpu:{index}"


def seed_everything(seed: int) -> None:
    """Seed PaddlePaddle's generators and choose repeatable kernels."""
    paddle.seed(seed)
    if paddle.is_compiled_with_cuda():  # Paddle: global flags, for which a build for the CPU raises ValueError
        paddle.set_flags({"FLAGS_cudnn_deterministic": True, "FLAGS_cudnn_exhaustive_search": False})
