"""Predictions: from images to the probability of every class."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from mobilenetv3_common.classes import num_classes_of
from mobilenetv3_common.wnids import IMAGENET_CLASSES
from mobilenetv3_ref.data import ClassificationPresetEval
from mobilenetv3_ref.device import select_device
from mobilenetv3_ref.models import MODELS, load_state_dict, read_weights
from sturdyio.cli import UserError


class Predictor:
    """A trained model with its preprocessing: RGB images -> probabilities (N, num_classes), float32.

    Each image is preprocessed as it comes, so that a generator's images are never held together.

    The weights, a file of weights or a training checkpoint, say how many classes there are; `class_names` are
    ImageNet's if that is 1000, else None. With `channels_last` activations lie in memory as (N, H, W, C), which is
    faster with PyTorch only. Raises UserError for weights that do not fit, a device that is not there, outputs that
    are not finite, or channels last with PaddlePaddle.
    """

    def __init__(
        self,
        model: str,
        weights: str | Path,
        device: str = "cpu",
        *,
        crop_size: int = 224,
        resize_size: int = 256,
        channels_last: bool = False,
    ) -> None:
        self.device = select_device(device)
        self.weights = weights
        self.transform = ClassificationPresetEval(crop_size=crop_size, resize_size=resize_size)
        arrays = read_weights(weights)
        self.num_classes = num_classes_of(arrays)
        self.class_names = IMAGENET_CLASSES if self.num_classes == len(IMAGENET_CLASSES) else None
        self.model = MODELS[model](num_classes=self.num_classes)
        load_state_dict(self.model, arrays, f"weights {weights}")
        self.model.to(self.device)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.model.eval()

    @torch.no_grad()
    def __call__(self, images: Iterable[Image.Image]) -> np.ndarray:
        tensors = [self.transform(image) for image in images]
        if not tensors:
            return np.zeros((0, self.num_classes), np.float32)
        batch = torch.stack(tensors).to(self.device)  # (N, 3, crop, crop)
        logits = self.model(batch)  # (N, num_classes)
        if not torch.isfinite(logits).all():
            raise UserError(f"weights {self.weights} give NaN or Inf: use weights from before training diverged")
        return F.softmax(logits, 1).cpu().numpy()
