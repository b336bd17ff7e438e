"""Predictions of an exported model: from images to the probability of every class."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from mobilenetv3_common.predictions import softmax
from mobilenetv3_deploy.engines import load
from mobilenetv3_deploy.preprocessing import preprocess
from sturdyio.cli import UserError


class Predictor:
    """An exported model in an engine, with its card's preprocessing: RGB images -> probabilities (N, num_classes).

    As the packages' own, which begin with a checkpoint: each image is preprocessed as it comes, and `class_names` is
    None where the card has none. Raises UserError as `load` does, and for outputs that are not finite.
    """

    def __init__(self, folder: str | Path, engine: str = "best", threads: int = 1) -> None:
        self.folder = folder
        self.engine = load(folder, engine, threads)
        self.card = self.engine.card
        self.num_classes = self.card.num_classes
        self.class_names = self.card.class_names

    def __call__(self, images: Iterable[Image.Image]) -> np.ndarray:
        arrays = [preprocess(image, self.card.preprocessing) for image in images]
        if not arrays:
            return np.zeros((0, self.num_classes), np.float32)
        return self.probabilities(np.stack(arrays))

    def probabilities(self, batch: np.ndarray) -> np.ndarray:
        """(N, 3, crop, crop), preprocessed, float32 -> (N, num_classes), float32."""
        output = self.engine.run(batch)
        if not np.isfinite(output).all():
            raise UserError(f"model {self.folder} gives NaN or Inf: export it from before training diverged")
        return softmax(output) if self.card.output == "logits" else output
