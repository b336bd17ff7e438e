"""Where tensors live, and what makes a run repeatable."""

import torch

from mobilenetv3_common.versions import check_version
from sturdyio.cli import UserError


def select_device(name: str, index: int = 0) -> torch.device:
    """The CPU or the card `index`; raises UserError when there is none, or the framework is too old."""
    check_version(torch, "2.13")  # the first with DistributedDataParallel(forward_sync_buffers=...)
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("--device gpu: this PyTorch sees no card; use --device cpu or install a build for CUDA")
    if index >= count:
        raise UserError(f"--device gpu: process {index} has no card; start {count} processes")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def seed_everything(seed: int) -> None:
    """Seed PyTorch's generators and choose repeatable kernels."""
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
