"""The layers whose arithmetic the two frameworks do differently.

PyTorch's own: they are the reference.
"""

from torch.nn import AdaptiveAvgPool2d, BatchNorm2d, Hardsigmoid

__all__ = ["AdaptiveAvgPool2d", "BatchNorm2d", "Hardsigmoid"]
