"""Several processes as one: started by `torchrun`, one process a card, or several on CPU (gloo)."""

import os
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mobilenetv3_ref.models.sync_batch_norm import SyncBatchNorm2d


def launched_rank() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) that the launcher gave this process; (0, 0, 1) without a launcher."""
    env = os.environ
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_distributed(device: torch.device) -> None:
    """Join the other processes, if there are any: over NCCL on cards, over gloo on CPU."""
    if launched_rank()[2] > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def log(line: str) -> None:
    """Print `line` on rank 0 alone."""
    if launched_rank()[0] == 0:
        print(line, flush=True)


def shut_down() -> None:
    """Leave the group of processes, once all is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """The model, changed in place, whose batch norm in train mode takes all processes' images for one batch.

    On cards with torch's own layer, which refuses the CPU, and with the project's own there. Parameters, buffers and
    their names stay.
    """
    if next(model.parameters()).is_cuda:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.__class__ = SyncBatchNorm2d  # a new layer would need new references in optimizers and hooks
    return model


def data_parallel(model: nn.Module) -> nn.Module:
    """The model whose backward averages gradients over the processes, from rank 0's weights; alone: the model.

    Batch-norm buffers stay each process's own until `broadcast_buffers`.
    """
    return DistributedDataParallel(model, forward_sync_buffers=False) if dist.is_initialized() else model


def unwrap(model: nn.Module) -> nn.Module:
    """The model that `data_parallel` was given."""
    return getattr(model, "module", model)


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process rank 0's batch-norm buffers, so that all evaluate and save the same model."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def all_reduce_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over the processes, in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return cast(list[float], total.tolist())
