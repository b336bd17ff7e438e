"""ImageNet's class names."""

from torchvision.models import MobileNet_V3_Small_Weights

IMAGENET_CLASSES: list[str] = MobileNet_V3_Small_Weights.DEFAULT.meta["categories"]  # by class id
