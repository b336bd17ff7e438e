"""ImageNet's 1000 classes: their names, their wnids, which its class folders are called, and the labels of these."""

import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from sturdyio.cli import UserError, unusable

# ILSVRC2012's folders in sorted order, which is the order of the classes in all libraries' weights. The file is timm
# 1.0.31's timm/data/_info/imagenet_synsets.txt, byte for byte; timm's names of them agree with torchvision's classes.
WNIDS = (files("mobilenetv3_common") / "imagenet_wnids.txt").read_text(encoding="ascii").split()
# Torchvision's names of them, which paddle.vision lacks: the "categories" of its weights, one a line.
IMAGENET_CLASSES = (files("mobilenetv3_common") / "imagenet_classes.txt").read_text(encoding="utf-8").splitlines()
IMAGENET_LABELS = {wnid: label for label, wnid in enumerate(WNIDS)}


def class_folders(root: str | Path, num_classes: int | None = None) -> tuple[list[str], dict[str, int]]:
    """(the class folders in `root`, sorted; the label of each). `num_classes` is that of weights to test, if any.

    A label is the folder's place. Only where weights for ImageNet's 1000 classes are tested on another number of
    folders it is the place of the folder's wnid among ImageNet's. Raises UserError for no folders, and for folders from
    which the labels of these weights cannot be told.
    """
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not names:
        raise no_images(root)
    for name in names:  # the libraries' image folders take one that cannot be read for an empty one
        try:
            os.scandir(Path(root, name)).close()
        except OSError as error:
            raise UserError(f"class folder {Path(root, name)} {unusable(error)}") from error
    if num_classes in (None, len(names)):
        return names, {name: place for place, name in enumerate(names)}
    if num_classes != len(WNIDS):
        raise UserError(
            f"data folder {root} has {len(names)} class folders, but the weights are for {num_classes} classes: give "
            "the folders of all the classes that they were trained on"
        )
    unknown = [name for name in names if name not in IMAGENET_LABELS]
    if unknown:
        raise UserError(
            f"data folder {root}: {len(unknown)} of {len(names)} class folders (first: {unknown[0]}) are no wnids of "
            "ImageNet's 1000 classes, which the weights are for: name each by its wnid (n02123045 is tabby), or give "
            f"weights for {len(names)} classes"
        )
    return names, {name: IMAGENET_LABELS[name] for name in names}


def check_images(
    root: str | Path, labels: Mapping[str, int], targets: Iterable[int], num_classes: int | None = None
) -> None:
    """Raise UserError unless each class folder has images, by the `labels` of the folders and of all images.

    Where ImageNet's 1000 classes are the labels, some may have none: their wnids say which class a folder is.
    """
    found, classes = set(targets), num_classes or len(labels)
    imagenet = classes == len(WNIDS) and labels.keys() <= IMAGENET_LABELS.keys()
    if not found or (len(found) < len(labels) and not imagenet):
        raise no_images(root)


def no_images(root: str | Path) -> UserError:
    """What is to be said of a data folder without class folders, or without images in one of them."""
    return UserError(f"data folder {root} must hold one folder a class, each with images in it")
