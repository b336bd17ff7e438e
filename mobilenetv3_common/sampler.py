"""Which images form which batch, on which process: one order for both frameworks."""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np


class BatchSampler:
    """Lists of indices, one a batch, for the process `rank` of `world_size`.

    A shuffled epoch is `default_rng([seed, epoch]).permutation(length)`, and process r takes every world_size-th index
    from r on. So the global batch b, joined over the processes, holds the same `batch_size * world_size` images as
    batch b of one process with that batch size.

    With `pad` (training) the order is lengthened by its own beginning until every process has as many images, as
    torch.utils.data.DistributedSampler does; without (evaluation) every image is taken exactly once.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool,
        pad: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.length = length
        self.batch_size = batch_size
        self.total = math.ceil(length / world_size) * world_size if pad else length  # images, repeated ones included
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = self.first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose the permutation of the next iteration, and the batch that it begins with."""
        self.epoch = epoch
        self.first_batch = first_batch

    def indices(self) -> list[int]:
        """This process's images in order."""
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        return np.resize(order, self.total)[self.rank :: self.world_size].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        indices = self.indices()
        for start in range(self.first_batch * self.batch_size, len(indices), self.batch_size):
            yield indices[start : start + self.batch_size]

    def __len__(self) -> int:
        """Batches of a whole epoch, those before `first_batch` included."""
        return self._batches_of(self.rank)

    @property
    def rounds(self) -> int:
        """Batches of the process that has most: without `pad` others may have one less."""
        return self._batches_of(0)

    def _batches_of(self, rank: int) -> int:
        return math.ceil(len(range(rank, self.total, self.world_size)) / self.batch_size)


def describe_images(root: str, samples: Sequence[tuple[str, int]], classes: Sequence[str]) -> dict[str, int | str]:
    """How many `images` and `classes` a data set has whose files lie under `root`, and a digest of their `names`.

    Not of what is in the files, and not of where the folder lies: data may move from disk to disk. In order, since a
    batch is a list of places in it.
    """
    names = [f"{path.removeprefix(root).replace(os.sep, '/')} {label}" for path, label in samples]
    digest = hashlib.sha256("\n".join([*classes, *names]).encode("utf-8", "surrogateescape")).hexdigest()
    return {"images": len(samples), "classes": len(classes), "names": digest}
