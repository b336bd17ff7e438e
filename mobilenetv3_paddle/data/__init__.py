"""Image folders, presets and loaders."""

from .dataset import ImageFolder
from .loader import build_dataset, build_loader, set_epoch
from .presets import ClassificationPresetEval, ClassificationPresetTrain

__all__ = [
    "ClassificationPresetEval",
    "ClassificationPresetTrain",
    "ImageFolder",
    "build_dataset",
    "build_loader",
    "set_epoch",
]
