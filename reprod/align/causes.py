"""What usually causes a difference, by the kind of item that differs first."""

import re
from collections.abc import Mapping

BY_LAYER = {
    "Conv2d": "stride, padding, dilation or groups; a weight that was not loaded or was loaded into another layer",
    "BatchNorm2d": "epsilon; running statistics not loaded (running_mean is _mean in Paddle); train for eval mode",
    "Linear": "weight not transposed (Paddle keeps it as in_features x out_features); bias missing",
    "ReLU": "another activation (ReLU6, hard-swish)",
    "Hardswish": "another activation (swish, ReLU); hard-swish with other constants",
    "Hardsigmoid": "slope (Paddle's default is 0.1666667, not 1/6) or offset; sigmoid in its place",
    "AdaptiveAvgPool2d": "max for average pooling; a pool over the wrong axes",
    "AvgPool2d": "whether padding counts in the mean (Paddle's exclusive=True leaves it out); ceil_mode",
    "MaxPool2d": "padding, ceil_mode",
    "Dropout": "active in eval mode; outputs scaled at another time (Paddle's downscale_in_infer)",
    "SqueezeExcitation": "the gate added instead of multiplied, or applied to another tensor",
    "InvertedResidual": "the residual connection missing, or present where channels or stride change",
    "Conv2dNormActivation": "order of convolution, normalization and activation",
}

# The first pattern found in the item's name decides.
BY_NAME = [
    (
        r"/(std|mean|quantiles|largest|all [01])$",
        "reset_parameters not called or past this layer; fan-in or the fan of a group, another gain, no normal; an "
        "initializer that is built and dropped (Paddle's nn.initializer.Normal(weight) fills nothing)",
    ),
    (r"/(distinct|correlation, .*|other tensors)$", "one draw used twice: broadcast, or the generator seeded again"),
    (r"^(frozen|live)/.*/grad/", "gradients added up instead of averaged over the processes, or not exchanged at all"),
    (r"^(frozen|live)/.*/param/", "a learning rate or batch size per process; a process that began with other weights"),
    (r"^(frozen|live)/.*/buffer/", "buffers not made equal before the model is evaluated and saved"),
    (
        r"/own/images$|^(train|val), \d+ processes/|^trained on/",
        "rank or world_size not given to the sampler; set_epoch not called; shares padded for evaluation",
    ),
    (r"^frozen/.*(samples|top[15]|loss)$|/evaluation/", "counts not summed over the processes; shares that overlap"),
    (r"/same seed again$", "a generator that the seed does not reach (NumPy's, or one made anew)"),
    (r"running_mean$", "batch-norm momentum: Paddle's is the share of the OLD value, 1 - PyTorch's"),
    (r"running_var$", "biased instead of unbiased batch variance (factor n / (n - 1)); batch-norm momentum convention"),
    (r"num_batches_tracked$", "batch norm in eval mode, or statistics not updated"),
    (r"^dropout", "dropout probability, or its mode (Paddle: upscale_in_train)"),
    (r"/lr$|^lr", "the schedule is not attached to the optimizer, not stepped, or stepped at another time; gamma"),
    (r"/grad/|gradient$", "an operation whose backward differs; a gradient not cleared, or scaled by the batch"),
    (
        r"/param/|^(sgd|sgd_nesterov|rmsprop|adamw)/",
        "optimizer formula: epsilon, weight decay, momentum, nesterov, learning rate of one group",
    ),
    (r"loss", "criterion: axis, reduction, label smoothing; or logits that differ (run 01_test_forward)"),
    (r"^classes|^files|^length", "class folders or files listed in another order, or filtered by suffix"),
    (r"label", "class folders sorted otherwise; labels off by one; samples in another order"),
    (r"^val/", "resize filter or size, crop, channel order (BGR for RGB), mean and std, scaling by 255"),
    (r"^train/", "crop box, flip, order of the random draws, interpolation, channel order, normalization"),
    (
        r"^augmented/",
        "AutoAugment after the flip: both operations, signs, magnitudes, interpolation; erasing after normalization",
    ),
    (r"^(mixup|cutmix)", "the draw's key (seed, epoch, batch), the partner, labels not mixed, CutMix's clipped box"),
    (r"^samples$", "a last batch that is not full left out (drop_last), or images counted twice"),
    (r"^(norm|length|lag) of ", "weight decay, momentum, learning rate, or the statistics' momentum over a whole run"),
    (r"^tie|top[15]", "ties, the k of top-k, the last partial batch, an average of averages"),
    (r"^shape/", "a layer missing, added or of another size; another width, kernel or number of classes"),
    (r"^logits", "the classifier, or a function between modules (flatten, residual)"),
]


def usual_causes(name: str, types: Mapping[str, str]) -> str:
    """The causes to look for first when the item `name` differs; `types` maps module names to layer types."""
    for pattern, causes in BY_NAME:
        if re.search(pattern, name):
            return causes
    return BY_LAYER.get(types.get(name, ""), 'see the README, "A check failed"')
