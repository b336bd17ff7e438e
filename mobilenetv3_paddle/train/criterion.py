"""The training loss."""

import paddle.nn.functional as F
from paddle import Tensor, nn


class SmoothedCrossEntropyLoss(nn.Layer):
    """Cross entropy against (1 - e) * one_hot + e / C.

    Paddle: `cross_entropy(label_smoothing=e)` holds e as a float32 constant, 3.5e-8 off; soft labels do not.
    """

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        num_classes = logits.shape[1]
        soft = F.one_hot(target, num_classes).astype(logits.dtype)
        soft = soft * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        return F.cross_entropy(logits, soft, soft_label=True)


def build_criterion(label_smoothing: float = 0.0) -> nn.Layer:
    """Mean cross entropy of logits (N, C), float, and labels (N,), int64 -> scalar, in nats.

    With label smoothing e the target is (1 - e) * one_hot + e / C (arXiv:1512.00567, section 7).
    """
    return SmoothedCrossEntropyLoss(label_smoothing) if label_smoothing else nn.CrossEntropyLoss()
