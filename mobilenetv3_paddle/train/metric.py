"""Top-k accuracy, with ties broken by class number so that both frameworks count alike."""

from collections.abc import Sequence

import paddle
from paddle import Tensor


def correct_at(logits: Tensor, target: Tensor, topk: Sequence[int] = (1, 5)) -> list[int]:
    """How many of the logits (N, C), float, have their label (N,), int64, among the k largest, for each k.

    Equal logits rank by class number, lowest first; a label whose logit is NaN is wrong for every k. (`topk` itself
    breaks ties as the kernel happens to, which neither framework documents.)
    """
    own = paddle.take_along_axis(logits, target[:, None], 1)  # (N, 1)
    behind = paddle.arange(logits.shape[1]) >= target[:, None]  # (N, C)
    beaten = (logits < own) | ((logits == own) & behind)  # the label beats itself
    rank = logits.shape[1] - beaten.sum(1)  # 0 is the best; C, past every k, if its logit is NaN
    return [int((rank < min(k, logits.shape[1])).sum()) for k in topk]
