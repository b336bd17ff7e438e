"""The training loss."""

from torch import nn


def build_criterion(label_smoothing: float = 0.0) -> nn.Module:
    """Mean cross entropy of logits (N, C), float, and labels (N,), int64 -> scalar, in nats.

    With label smoothing e the target is (1 - e) * one_hot + e / C (arXiv:1512.00567, section 7).
    """
    return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
