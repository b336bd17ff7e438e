"""Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) of a batch, in the training loop."""

import paddle.nn.functional as F
from paddle import Tensor

from mobilenetv3_common.draws import batch_rng, random_mix


class RandomMix:
    """Mixes each image of a batch, and its label, with a partner; one draw a batch, the same on every process.

    Source: torchvision's references/classification/transforms.py, RandomMixup and RandomCutmix with p = 1, of which
    each batch takes one at random where both alphas are above 0. Two things differ, so that a run does not depend on
    the number of its processes: all processes draw alike, from (seed, epoch, batch); and the partner of image l of N is
    l + N // 2 (mod N), where torchvision takes its neighbour. A process r of W holds the images l * W + r of the global
    batch, so for an even N the partner lies N * W / 2 further in it, whatever W is. For an odd N (an odd batch size per
    process, or such a last batch) the pairs depend on W.
    """

    def __init__(self, num_classes: int, *, mixup_alpha: float, cutmix_alpha: float, seed: int) -> None:
        self.num_classes = num_classes
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.seed = seed

    def __call__(self, image: Tensor, target: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Images (N, 3, H, W), float, and labels (N,), int64 -> new images and soft targets (N, C), both float."""
        height, width = image.shape[2:]
        mix = random_mix(batch_rng(self.seed, epoch, batch), height, width, self.mixup_alpha, self.cutmix_alpha)
        soft = F.one_hot(target, self.num_classes).to(image.dtype)  # (N, C)
        shift = -(len(image) // 2)
        partner = image.roll(shift, 0)
        if mix.box is None:
            image = image * mix.share + partner * (1 - mix.share)
        else:
            top, left, box_height, box_width = mix.box
            rows, columns = slice(top, top + box_height), slice(left, left + box_width)
            image = image.clone()
            if box_height and box_width:  # Paddle: raises on assignment to an empty slice
                image[:, :, rows, columns] = partner[:, :, rows, columns]
        return image, soft * mix.share + soft.roll(shift, 0) * (1 - mix.share)


def build_mix(
    num_classes: int, *, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, seed: int = 0
) -> RandomMix | None:
    """The mixing of a run's batches; None if both are off. The alphas are those of the Beta distribution, 0 is off."""
    if mixup_alpha == 0 and cutmix_alpha == 0:
        return None
    return RandomMix(num_classes, mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha, seed=seed)
