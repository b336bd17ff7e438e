"""Datasets and loaders of a training run: DATA_PATH/train and DATA_PATH/val, in batches."""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import paddle
from paddle import Tensor, io

from mobilenetv3_common.preemption import outlive_stop_request, starting_workers
from mobilenetv3_common.sampler import BatchSampler
from sturdyio.cli import UserError

from .dataset import ImageFolder
from .presets import ClassificationPresetEval, ClassificationPresetTrain


class DataLoader:
    """Batches from a dataset, in this process or from workers, and whatever the dataset raises.

    Paddle: its own loader waits for ever when the dataset raises in this process (and takes a fifth longer, for copies
    from thread to thread), and hides the exception when it does in a worker. Here this process needs no loader, and an
    exception in a worker travels as a batch of its own.
    """

    dataset: ImageFolder
    batch_sampler: BatchSampler

    def __init__(
        self,
        dataset: ImageFolder,
        *,
        batch_sampler: BatchSampler,
        num_workers: int,
        worker_init_fn: Callable[[int], None],
    ) -> None:
        """Paddle: what its own takes and has, as far as it is used."""
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self._loader = io.DataLoader(
            _Guarded(dataset),
            batch_sampler=batch_sampler,  # type: ignore[arg-type]  # any iterable will do
            num_workers=num_workers,
            collate_fn=_collate,  # type: ignore[arg-type]  # it may return anything
            worker_init_fn=worker_init_fn,
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)  # Paddle: part of what a loader is

    def __iter__(self) -> Iterator[list[Tensor]]:
        if self.num_workers > 0:  # Paddle: else its loader has a thread, see above
            yield from self._from_workers()
            return
        for indices in self.batch_sampler:  # Paddle: from_dlpack shares the arrays' memory, to_tensor would copy it
            arrays = _collate([self.dataset[index] for index in indices])
            yield [paddle.from_dlpack(cast(np.ndarray, array)) for array in arrays]

    def _from_workers(self) -> Iterator[list[Tensor]]:
        """Paddle: what a worker found wrong is among its batches, and they must be told to end."""
        with starting_workers():
            batches: Any = iter(self._loader)
        try:
            for images, labels in batches:
                if isinstance(labels, Exception):
                    raise labels
                yield [images, labels]
        finally:  # Paddle: its thread keeps an iterator that was left half-way, and so its workers, alive
            batches._try_shutdown_all()


class _Guarded(io.Dataset):
    """A dataset that returns what it would raise.

    Paddle: see DataLoader.
    """

    def __init__(self, dataset: io.Dataset) -> None:
        self.dataset = dataset  # Paddle: wrapped, so that ours stays one that raises

    def __len__(self) -> int:
        return len(self.dataset)  # Paddle: part of what a dataset is

    def __getitem__(self, index: int) -> tuple[np.ndarray, int] | Exception:
        try:
            return self.dataset[index]
        except UserError as error:  # Paddle: would hide it, see DataLoader
            return error
        except Exception:
            return RuntimeError(traceback.format_exc())


def _collate(items: list[tuple[np.ndarray, int] | Exception]) -> tuple[np.ndarray, np.ndarray | Exception]:
    """(images, labels) of a batch, or a zero and the first exception.

    Paddle: see DataLoader.
    """
    for item in items:
        if isinstance(item, Exception):
            return np.zeros(1), item  # a batch without any array, or with an empty one, would be lost
    images, labels = zip(*items, strict=True)
    return np.stack(images), np.array(labels)


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
