"""ImageNet's class names."""

from importlib.resources import files

# Paddle: paddle.vision has no class names; the file holds torchvision's, one a line.
IMAGENET_CLASSES: list[str] = (  # by class id
    (files("mobilenetv3_paddle.data") / "imagenet_classes.txt").read_text(encoding="utf-8").splitlines()
)
