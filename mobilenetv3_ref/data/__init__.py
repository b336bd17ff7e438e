"""Image folders, presets and loaders."""

from .dataset import ImageFolder
from .loader import build_dataset, build_loader, set_epoch
from .mix import RandomMix, build_mix
from .presets import ClassificationPresetEval, ClassificationPresetTrain

__all__ = [
    "ClassificationPresetEval",
    "ClassificationPresetTrain",
    "ImageFolder",
    "RandomMix",
    "build_dataset",
    "build_loader",
    "build_mix",
    "set_epoch",
]
