"""An image folder in ImageNet's layout: one folder a class, labels in the folders' sorted order."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from paddle.vision import datasets
from PIL import Image

from mobilenetv3_common.draws import item_rng
from mobilenetv3_common.images import read_image
from portproof.io.cli import UserError, existing_dir


class ImageFolder(datasets.DatasetFolder):  # Paddle: the class with labels; its ImageFolder has none
    """(image, label) by index; `transform(image, rng)` gets the draws of this seed, epoch and index.

    Raises UserError when `root` is missing, has no class folders, or a class folder without images.
    """

    def __init__(
        self, root: str | Path, transform: Callable[[Image.Image, np.random.Generator], np.ndarray], seed: int = 0
    ) -> None:
        root = existing_dir(root, "data folder")
        try:
            super().__init__(str(root), read_image, transform=transform)
            if len(set(self.targets)) < len(self.classes):  # Paddle: an empty class folder is taken without a word
                raise RuntimeError("a class folder without images")
        except RuntimeError as error:
            raise UserError(f"data folder {root} must hold one folder a class, each with images in it") from error
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the draws of the next pass over the data."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, target = self.samples[index]
        return self.transform(self.loader(path), item_rng(self.seed, self.epoch, index)), target
