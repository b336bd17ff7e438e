"""The optimizers of torchvision's references/classification/train.py, its parameter groups and its settings."""

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from mobilenetv3_common.arguments import Schedule

from .lr_scheduler import build_lr_scheduler

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(
    model: nn.Module, weight_decay: float, norm_weight_decay: float | None, bias_weight_decay: float | None
) -> list[dict[str, Any]]:
    """[{"params": [...], "weight_decay": float}] of all trained parameters: biases, normalization layers', others.

    As torchvision's `set_weight_decay`: None leaves those parameters among the others, and the bias of a normalization
    layer is a bias first.
    """
    decays = {"other": weight_decay, "norm": norm_weight_decay, "bias": bias_weight_decay}
    params: dict[str, list[Tensor]] = {kind: [] for kind in decays}
    for _, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if bias_weight_decay is not None and name == "bias":
                params["bias"].append(parameter)
            elif norm_weight_decay is not None and isinstance(module, NORMS):
                params["norm"].append(parameter)
            else:
                params["other"].append(parameter)
    return [
        {"params": params[kind], "weight_decay": float(decay)}
        for kind, decay in decays.items()
        if decay is not None and params[kind]
    ]


def build_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    opt: str = "sgd",
    momentum: float = 0.9,
    norm_weight_decay: float | None = None,
    bias_weight_decay: float | None = None,
    **schedule: Any,
) -> tuple[Optimizer, LRScheduler]:
    """The optimizer `opt` (sgd, sgd_nesterov, rmsprop or adamw) and its schedule, to be stepped once an epoch.

    Weight decay is added to the gradient, but for adamw, which shrinks the weights; adamw has no `momentum`. Decays of
    None are as `weight_decay`. `schedule` is what Schedule holds. Raises ValueError for another name.
    """
    groups = parameter_groups(model, weight_decay, norm_weight_decay, bias_weight_decay)
    if opt in ("sgd", "sgd_nesterov"):
        optimizer: Optimizer = SGD(groups, lr, momentum=momentum, nesterov=opt == "sgd_nesterov")
    elif opt == "rmsprop":
        optimizer = RMSprop(groups, lr, momentum=momentum, alpha=0.9, eps=0.0316)
    elif opt == "adamw":
        optimizer = AdamW(groups, lr)
    else:
        raise ValueError(f"opt {opt!r}: choose sgd, sgd_nesterov, rmsprop or adamw")
    return optimizer, build_lr_scheduler(optimizer, Schedule(**schedule))
