"""ImageNet's class names."""

from importlib.resources import files

# Paddle: paddle.vision has no class names; the file holds torchvision's, one a line.
_NAMES = files("mobilenetv3_paddle.data") / "imagenet_classes.txt"
IMAGENET_CLASSES: list[str] = _NAMES.read_text(encoding="utf-8").splitlines()  # by class id
