"""The training loss."""

from torch import nn


def build_criterion(label_smoothing: float = 0.0) -> nn.Module:
    """Mean cross entropy of logits (N, C), float, and a target -> scalar, in nats.

    The target is labels (N,), int64, or soft targets (N, C): probabilities in the logits' precision. With label
    smoothing e it becomes (1 - e) * target + e / C, labels as one-hot (arXiv:1512.00567, section 7).
    """
    return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
