"""Datasets and loaders of a training run: DATA_PATH/train and DATA_PATH/val, in batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import data

from mobilenetv3_common.preemption import outlive_stop_request, starting_workers
from mobilenetv3_common.sampler import BatchSampler

from .dataset import ImageFolder
from .presets import ClassificationPresetEval, ClassificationPresetTrain


class DataLoader(data.DataLoader):
    """PyTorch's own, with workers that outlive a stop request, however they start, and end where a pass is left."""

    dataset: ImageFolder
    batch_sampler: BatchSampler

    def __iter__(self) -> Iterator[list[Tensor]]:  # type: ignore[override]  # torch's is a class
        with starting_workers():
            batches: Any = super().__iter__()
        try:
            yield from batches
        finally:  # an exception's frames keep an iterator that was left half-way, and so its workers, alive
            if self.num_workers > 0:
                batches._shutdown_workers()


def build_dataset(
    data_path: str | Path,
    *,
    train: bool,
    crop_size: int = 224,
    resize_size: int = 256,
    seed: int = 0,
    num_classes: int | None = None,
    **augmentation: Any,
) -> ImageFolder:
    """The training or validation images with their preset, to which the options go; raises UserError as ImageFolder.

    `resize_size` and `num_classes`, that of the weights to test, are for validation alone, `augmentation` for training.
    """
    if train:
        train_preset = ClassificationPresetTrain(crop_size=crop_size, **augmentation)
        return ImageFolder(Path(data_path) / "train", train_preset, seed)
    eval_preset = ClassificationPresetEval(crop_size=crop_size, resize_size=resize_size)
    return ImageFolder(Path(data_path) / "val", eval_preset, seed, num_classes)


def build_loader(
    dataset: ImageFolder,
    batch_size: int,
    *,
    train: bool,
    workers: int = 0,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader:
    """Batches of images (N, 3, H, W), float32, and labels (N,), int64; `batch_size` is per process.

    Training shuffles and pads to equal shares, evaluation takes every image once in order (see BatchSampler). Call
    `set_epoch` before each training epoch.
    """
    batch_sampler = BatchSampler(
        len(dataset), batch_size, shuffle=train, pad=train, seed=seed, rank=rank, world_size=world_size
    )
    return DataLoader(dataset, batch_sampler=batch_sampler, num_workers=workers, worker_init_fn=outlive_stop_request())


def set_epoch(loader: DataLoader, epoch: int, first_batch: int = 0) -> None:
    """Choose the order and the draws of the next pass over the data, and its first batch; later workers see it."""
    loader.batch_sampler.set_epoch(epoch, first_batch)
    loader.dataset.set_epoch(epoch)
