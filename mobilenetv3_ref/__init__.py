"""MobileNetV3 in PyTorch: the reference, bit-equal to torchvision 0.29.1."""
