"""Usual causes of a difference, by the kind of item."""

from collections.abc import Mapping

from portproof.compare import Item

# By layer type, statistic or kind of item. A rung may have its own: `compare(..., hints=)`.
CAUSES = {
    "output": "the classifier, or a function between modules (flatten, residual)",  # of the whole model
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
    "buffer running_mean": "batch-norm momentum: Paddle's is the share of the OLD value, 1 - PyTorch's",
    "buffer running_var": "biased instead of unbiased batch variance (factor n / (n - 1)); batch-norm momentum "
    "convention",
    "buffer num_batches_tracked": "batch norm in eval mode, or statistics not updated",
    "structure": "a layer missing, added or of another size; another width, kernel or number of classes",
    "dropout": "dropout probability, or its mode (Paddle: upscale_in_train)",
    "lr": "the schedule is not attached to the optimizer, not stepped, or stepped at another time; gamma",
    "gradient": "an operation whose backward differs; a gradient not cleared, or scaled by the batch",
    "parameter": "optimizer formula: epsilon, weight decay, momentum, nesterov, learning rate of one group",
    "loss": "criterion: axis, reduction, label smoothing; or logits that differ (run 01_test_forward)",
    "metric": "ties, the k of top-k, the last partial batch, an average of averages",
    "samples": "a last batch that is not full left out (drop_last), or images counted twice",
    "files": "class folders or files listed in another order, or filtered by suffix",
    "label": "class folders sorted otherwise; labels off by one; samples in another order",
    "distribution": "reset_parameters not called or past this layer; fan-in or the fan of a group, another gain, no "
    "normal; an initializer that is built and dropped (Paddle's nn.initializer.Normal(weight) fills nothing)",
    "independence": "one draw used twice: broadcast, or the generator seeded again",
    "seed": "a generator that the seed does not reach (NumPy's, or one made anew)",
    "trajectory": "weight decay, momentum, learning rate, or the statistics' momentum over a whole run",
}


def usual_causes(item: Item, types: Mapping[str, str], hints: Mapping[str, str]) -> str:
    """The usual causes, or "". `types`: {module: layer type}; `hints` come before CAUSES."""
    if item.kind in hints:
        return hints[item.kind]
    if item.kind == "output" and item.module:
        return CAUSES.get(types.get(item.module, ""), "")
    return CAUSES.get(f"buffer {item.leaf}" if item.kind == "buffer" else item.kind, "")
