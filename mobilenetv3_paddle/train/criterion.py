"""The training loss."""

import paddle.nn.functional as F
from paddle import Tensor, nn


class CrossEntropyLoss(nn.Layer):
    """Mean cross entropy against (1 - e) * target + e / C, as torch.nn.CrossEntropyLoss(label_smoothing=e).

    Paddle: on CPU the native kernel cuts log-probabilities off at -64 and so reports no loss above it (its gradient is
    right), and it holds e as a float32 constant, 3.5e-8 off; written out, neither happens.
    """

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing  # Paddle: a Python number, so that it stays in double precision

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        num_classes = logits.shape[1]
        shifted = logits - logits.max(axis=1, keepdim=True).detach()  # (N, C); exp() cannot overflow
        # Paddle: in float64, because `sum` adds one value after another (3 times the rounding over 1000 classes)
        log_sum = shifted.exp().sum(axis=1, keepdim=True, dtype="float64").log().astype(logits.dtype)  # (N, 1)
        soft = target
        if target.ndim == 1:
            soft = F.one_hot(target, num_classes).astype(logits.dtype)  # raises ValueError for a label out of range
        soft = soft * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        return (soft * (log_sum - shifted)).sum(axis=1, dtype="float64").mean().astype(logits.dtype)


def build_criterion(label_smoothing: float = 0.0) -> nn.Layer:
    """Mean cross entropy of logits (N, C), float, and a target -> scalar, in nats.

    The target is labels (N,), int64, or soft targets (N, C): probabilities in the logits' precision. With label
    smoothing e it becomes (1 - e) * target + e / C, labels as one-hot (arXiv:1512.00567, section 7).
    """
    return CrossEntropyLoss(label_smoothing)
