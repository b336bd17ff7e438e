"""Several processes as one: started by `paddle.distributed.launch`, one process a card, or several on CPU (gloo)."""

import os
from collections.abc import Sequence
from typing import cast

import paddle
import paddle.distributed as dist
from paddle import nn

from mobilenetv3_paddle.models.layers import BatchNorm2D
from mobilenetv3_paddle.models.sync_batch_norm import SyncBatchNorm2D


def launched_rank() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) that the launcher gave this process; (0, 0, 1) without a launcher."""
    env = os.environ
    # Paddle: with --devices 4,5 the cards of the processes 0 and 1 are 4 and 5
    local_rank = env.get("FLAGS_selected_gpus", env.get("PADDLE_RANK_IN_NODE", "0")).split(",")[0]
    return int(env.get("PADDLE_TRAINER_ID", 0)), int(local_rank), int(env.get("PADDLE_TRAINERS_NUM", 1))


def init_distributed(device: str) -> None:
    """Join the other processes, if there are any: over NCCL on cards, over gloo on CPU."""
    if launched_rank()[2] > 1:
        if device == "cpu":
            os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"  # Paddle: a build for cards would take NCCL, and the cards
        dist.init_parallel_env()


def log(line: str) -> None:
    """Print `line` on rank 0 alone."""
    if launched_rank()[0] == 0:
        print(line, flush=True)


def shut_down() -> None:
    """Leave the group of processes, once all is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def convert_sync_batchnorm(model: nn.Layer) -> nn.Layer:
    """The model, changed in place, whose batch norm in train mode takes all processes' images for one batch.

    With the project's own layer. Parameters, buffers and their names stay. Raises ValueError for a native batch norm.

    Paddle: on cards, too, since its nn.SyncBatchNorm keeps the biased variance.
    """
    for m in model.sublayers(include_self=True):  # Paddle: would leave the model itself out
        if isinstance(m, BatchNorm2D):
            m.__class__ = SyncBatchNorm2D  # a new layer would need new references in optimizers and hooks
        elif isinstance(m, nn.BatchNorm2D):  # Paddle: what the project's has, and this one lacks, is a buffer
            raise ValueError("paddle.nn.BatchNorm2D counts no batches: build the model with mobilenetv3_paddle's")
    return model


def data_parallel(model: nn.Layer) -> nn.Layer:
    """The model whose backward averages gradients over the processes, from rank 0's weights; alone: the model.

    Batch-norm buffers stay each process's own until `broadcast_buffers`.
    """
    # Paddle: sends buffers here and never again, so that there is no forward_sync_buffers to turn off
    return paddle.DataParallel(model) if dist.is_initialized() else model


def unwrap(model: nn.Layer) -> nn.Layer:
    """The model that `data_parallel` was given."""
    return getattr(model, "_layers", model)  # Paddle: it has no public name for it


def broadcast_buffers(model: nn.Layer) -> None:
    """Give every process rank 0's batch-norm buffers, so that all evaluate and save the same model."""
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            if tensor.stop_gradient:  # Paddle: running statistics are parameters without gradient, no buffers
                dist.broadcast(tensor, 0)


def all_reduce_sum(values: Sequence[float], device: str) -> list[float]:
    """Each value summed over the processes, in float64."""
    total = paddle.to_tensor(values, dtype="float64", place=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return cast(list[float], total.tolist())
