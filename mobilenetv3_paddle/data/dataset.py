"""An image folder in ImageNet's layout: one folder a class, labels in the folders' sorted order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from paddle.vision import datasets
from PIL import Image

from mobilenetv3_common.draws import item_rng
from mobilenetv3_common.images import read_image
from mobilenetv3_common.wnids import check_images, class_folders, no_images
from sturdyio.cli import existing_dir


class ImageFolder(datasets.DatasetFolder):  # Paddle: the class with labels; its ImageFolder has none
    """(image, label) by index; `transform(image, rng)` gets the draws of this seed, epoch and index.

    `num_classes` is that of the weights to test, if any: those for ImageNet's 1000 classes take any of its folders, see
    `class_folders`. Raises UserError when `root` is missing, has no class folders, such as these weights cannot be
    tested on, or a class folder without images, unless the classes are ImageNet's 1000.
    """

    loader: Callable[[str], Image.Image]  # Paddle: its own may be None
    transform: Callable[..., Any]  # Paddle: its own takes the image alone

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Image.Image, np.random.Generator], np.ndarray],
        seed: int = 0,
        num_classes: int | None = None,
    ) -> None:
        root = existing_dir(root, "data folder")
        self.num_classes = num_classes
        try:
            super().__init__(str(root), read_image, transform=cast(Any, transform))
        except RuntimeError as error:  # Paddle: raises when there are no images at all, and takes empty folders
            raise no_images(root) from error
        # Paddle: targets are numbers, and text in its stub
        check_images(root, self.class_to_idx, self.targets, num_classes)  # type: ignore[arg-type]
        self.seed = seed
        self.epoch = 0

    def _find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """(class folders, the label of each)."""
        return class_folders(directory, self.num_classes)

    def set_epoch(self, epoch: int) -> None:
        """Choose the draws of the next pass over the data."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, target = self.samples[index]
        return self.transform(self.loader(path), item_rng(self.seed, self.epoch, index)), target
