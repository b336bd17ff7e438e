"""The optimizers of torchvision's references/classification/train.py, its parameter groups and its settings."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from mobilenetv3_common.arguments import Schedule
from sturdyio.cli import UserError

from .lr_scheduler import build_lr_scheduler

# Paddle: its names of the base classes
NORMS = (nn.layer.norm._BatchNormBase, nn.layer.norm._InstanceNormBase, nn.LayerNorm, nn.GroupNorm)


# Paddle: the optimizers that call the kernels of these names, and how, which is how the port calls them, too
KERNELS: dict[str, tuple[type[Optimizer], str]] = {
    "sgd_": (paddle.optimizer.SGD, "param_and_grad[0], lr, param_and_grad[1], master_weight, find_master,"),
    "adam_": (
        paddle.optimizer.Adam,
        """param_and_grad[0], param_and_grad[1], lr, moment1, moment2, moment2_max, beta1_pow_acc, beta2_pow_acc,
        master_weight, found_inf, _beta1, _beta2, self._epsilon, self._lazy_mode, 1000, find_master, False,
        self._amsgrad,""",
    ),
}


def kernel(name: str) -> Callable:
    """A kernel of KERNELS; raises UserError where it takes other arguments, which would crash Python.

    Paddle: they are private, but public operations in the place of Adam's give other last bits, and for
    mobilenet_v3_small take 10 to 17 ms more on one core: 7 to 11 % of a training step with 8 images of 96 pixels, under
    1 % with 32 of 224. SGD's, called through its optimizer, would take 1 ms more.
    """
    optimizer, arguments = KERNELS[name]
    source = inspect.getsource(optimizer._append_optimize_op)  # a kernel cannot be asked
    call = re.search(rf"_C_ops\.{name}\((.*?)\)", source, re.DOTALL)
    if call is None or call[1].split() != arguments.split():
        raise UserError(
            f"PaddlePaddle {paddle.__version__} calls its kernel {name} otherwise than 3.3.1: "
            "training needs paddlepaddle==3.3.1"
        )
    return getattr(paddle._C_ops, name)


class TorchOptimizer(Optimizer):
    """What the optimizers below share: groups of parameters, and updates in place, one parameter at a time.

    Paddle: its own optimizers hold coefficients as float32 constants, 2e-8 off in float64, and RMSProp has another
    formula. These are put together from operations that take such numbers as they are.
    """

    ACCUMULATORS: tuple[str, ...] = ()  # names, in the order in which `update` takes them

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float | LRScheduler) -> None:
        super().__init__(learning_rate, groups)  # Paddle: takes the rate first
        self.sgd_kernel = kernel("sgd_")

    def update(self, parameter: Tensor, gradient: Tensor, weight_decay: float, *accumulators: Tensor) -> None:
        """Change `parameter` and its `accumulators` in place; `gradient` stays as it is.

        Paddle: the formula alone, which PyTorch's `step` has within loops over groups and parameters.
        """
        raise NotImplementedError

    def descend(self, parameter: Tensor, direction: Tensor) -> None:
        """parameter <- parameter - lr * direction, in place.

        Paddle: its SGD has no coefficients that could be off.
        """
        self.sgd_kernel(parameter, self._global_learning_rate(), direction, None, False)  # no master weight

    def create_accumulators(self, parameter: Tensor) -> dict[str, Tensor]:
        """The accumulators of `parameter` by name; made, of zeros, if there are none yet.

        Paddle: they belong to the optimizer, by the parameter's generated name, where PyTorch has `state[parameter]`.
        """
        for name in self.ACCUMULATORS:
            if parameter.name not in self._accumulators[name]:
                self._add_accumulator(name, parameter)
        return {name: self._accumulators[name][parameter.name] for name in self.ACCUMULATORS}

    def _create_regularization_of_grad(self, param: Tensor, grad: Tensor, regularization: Any = None) -> Tensor:
        return grad  # Paddle: would decay the weights here, and by a float32 number

    def _create_accumulators(self, block: Any, parameters: dict[str, Any]) -> None:
        """Paddle: `step` calls it with the parameters that have a gradient."""
        for parameter in parameters["params"]:
            if parameter.name not in self._accumulators[self.ACCUMULATORS[0]]:
                self.create_accumulators(parameter)

    def _append_optimize_op(self, block: Any, param_and_grad: dict[str, Any]) -> None:
        """Paddle: `step` calls it for each parameter."""
        parameter, gradient = param_and_grad["params"]
        accumulators = [self._accumulators[kind][parameter.name] for kind in self.ACCUMULATORS]
        self.update(parameter, gradient, param_and_grad["weight_decay"], *accumulators)


class SGD(TorchOptimizer):
    """v <- momentum * v + g;  w <- w - lr * v  (torch.optim.SGD), with g = gradient + weight_decay * w.

    With Nesterov's momentum w <- w - lr * (g + momentum * v).

    Paddle: its Momentum has the same formulas, and float32 coefficients.
    """

    ACCUMULATORS = ("velocity",)

    def __init__(
        self, groups: list[dict[str, Any]], learning_rate: float | LRScheduler, *, momentum: float, nesterov: bool
    ) -> None:
        super().__init__(groups, learning_rate)
        self.momentum = momentum  # Paddle: Python's numbers, so that they stay in double precision
        self.nesterov = nesterov

    def update(self, parameter: Tensor, gradient: Tensor, weight_decay: float, *accumulators: Tensor) -> None:
        """Paddle: the formula above."""
        (velocity,) = accumulators
        if weight_decay:
            gradient = parameter.scale(weight_decay).add_(gradient)
        velocity.scale_(self.momentum).add_(gradient)
        self.descend(parameter, gradient + velocity.scale(self.momentum) if self.nesterov else velocity)


class AdamOptimizer(TorchOptimizer):
    """What RMSprop and AdamW share: quotients of two moments.

    Paddle: see `kernel`.
    """

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float | LRScheduler) -> None:
        super().__init__(groups, learning_rate)
        self.adam_kernel = kernel("adam_")
        self.zero = paddle.zeros([1], self._dtype)  # Paddle: a power of beta of 0, by which the kernel corrects no bias

    def adam_(
        self,
        target: Tensor,
        gradient: Tensor,
        rate: Tensor,
        moment1: Tensor,
        moment2: Tensor,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        """target <- target - rate * moment1 / (sqrt(moment2) + epsilon), all but `gradient` and `rate` in place, with

        moment1 <- beta1 * moment1 + (1 - beta1) * gradient;  moment2 <- beta2 * moment2 + (1 - beta2) * gradient^2.

        Paddle: `rate` is a tensor (1,) of the parameters' precision.
        """
        fixed = (False, 1000, False, True, False)  # not lazy, no master weight, powers stay, no AMSGrad
        powers = (self.zero, self.zero)
        self.adam_kernel(target, gradient, rate, moment1, moment2, None, *powers, None, None, *betas, epsilon, *fixed)


class RMSprop(AdamOptimizer):
    """s <- alpha * s + (1 - alpha) * g^2;  b <- momentum * b + g / (sqrt(s) + eps);  w <- w - lr * b
    (torch.optim.RMSprop), with g = gradient + weight_decay * w.

    Paddle: its RMSProp adds epsilon under the root and multiplies by the learning rate before the momentum; after 3
    steps with gradient 1 and eps 0.0316 a weight of 1.0 is 0.147 there, 0.125 here. Adam's kernel has the root right.
    """

    ACCUMULATORS = ("square_avg", "momentum_buffer")

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float | LRScheduler,
        *,
        momentum: float,
        alpha: float,
        epsilon: float,
    ) -> None:
        super().__init__(groups, learning_rate)
        self.momentum = momentum
        self.alpha = alpha
        self.epsilon = epsilon
        self.minus_one = paddle.full([1], -1.0, self._dtype)  # Paddle: a rate by which the kernel adds

    def update(self, parameter: Tensor, gradient: Tensor, weight_decay: float, *accumulators: Tensor) -> None:
        """Paddle: the formula above, from Adam's."""
        square_avg, buffer = accumulators
        if weight_decay:
            gradient = parameter.scale(weight_decay).add_(gradient)
        buffer.scale_(self.momentum)
        # With beta1 = 0 the first moment is the gradient, so the gradient can be it.
        self.adam_(buffer, gradient, self.minus_one, gradient, square_avg, (0.0, self.alpha), self.epsilon)
        self.descend(parameter, buffer)


class AdamW(AdamOptimizer):
    """m <- 0.9 * m + 0.1 * gradient;  v <- 0.999 * v + 0.001 * gradient^2;  w <- (1 - lr * weight_decay) * w;
    w <- w - lr / (1 - 0.9^t) * m / (sqrt(v / (1 - 0.999^t)) + 1e-8) at step t  (torch.optim.AdamW).

    Paddle: its AdamW holds weight decay as float32, and in float32 also 1 - 0.999^t, a step 3e-6 off.
    """

    ACCUMULATORS = ("moment1", "moment2", "step")
    EPSILON = 1e-8

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float | LRScheduler) -> None:
        super().__init__(groups, learning_rate)
        # Paddle: as the kernel has them; with another 0.999 the correction for it would not fit, 1.3e-5 off in float32
        beta1, beta2 = cast(list[float], paddle.to_tensor([0.9, 0.999], self._dtype).astype("float64").tolist())
        self.betas = beta1, beta2

    def create_accumulators(self, parameter: Tensor) -> dict[str, Tensor]:
        """Paddle: the step is a tensor, so that it is saved, and on the CPU, where reading it waits for nothing."""
        if parameter.name not in self._accumulators["step"]:
            self._add_accumulator("step", parameter, "float64", shape=[1], device="cpu")
        return super().create_accumulators(parameter)

    def update(self, parameter: Tensor, gradient: Tensor, weight_decay: float, *accumulators: Tensor) -> None:
        """Paddle: the formula above, with the corrections of the moments in rate and epsilon."""
        moment1, moment2, step = accumulators
        if weight_decay:
            parameter.scale_(1 - self.get_lr() * weight_decay)
        t = cast(float, step.scale_(1.0, 1.0).item())
        unbias1, unbias2 = 1 - self.betas[0] ** t, math.sqrt(1 - self.betas[1] ** t)
        rate = self._global_learning_rate().scale(unbias2 / unbias1)
        self.adam_(parameter, gradient, rate, moment1, moment2, self.betas, self.EPSILON * unbias2)


def parameter_groups(
    model: nn.Layer, weight_decay: float, norm_weight_decay: float | None, bias_weight_decay: float | None
) -> list[dict[str, Any]]:
    """[{"params": [...], "weight_decay": float}] of all trained parameters: biases, normalization layers', others.

    As torchvision's `set_weight_decay`: None leaves those parameters among the others, and the bias of a normalization
    layer is a bias first.
    """
    decays = {"other": weight_decay, "norm": norm_weight_decay, "bias": bias_weight_decay}
    params: dict[str, list[Tensor]] = {kind: [] for kind in decays}
    for _, module in model.named_sublayers(include_self=True):  # Paddle: would leave the model itself out
        for name, parameter in module.named_parameters(include_sublayers=False):
            if parameter.stop_gradient:  # Paddle: running statistics are parameters, too
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
    model: nn.Layer,
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
    # Paddle: the schedule comes first, and is the optimizer's rate
    lr = build_lr_scheduler(lr, Schedule(**schedule))  # type: ignore[assignment]
    if opt in ("sgd", "sgd_nesterov"):
        optimizer: Optimizer = SGD(groups, lr, momentum=momentum, nesterov=opt == "sgd_nesterov")
    elif opt == "rmsprop":
        optimizer = RMSprop(groups, lr, momentum=momentum, alpha=0.9, epsilon=0.0316)
    elif opt == "adamw":
        optimizer = AdamW(groups, lr)
    else:
        raise ValueError(f"opt {opt!r}: choose sgd, sgd_nesterov, rmsprop or adamw")
    return optimizer, lr  # type: ignore[return-value]  # Paddle: see above


def optimizer_state(model: nn.Layer, optimizer: TorchOptimizer) -> dict[str, np.ndarray]:
    """The accumulators of every parameter that has been updated, as {"features.0.0.weight/velocity": array}.

    Paddle: its own keys begin with generated names (conv2d_7.w_0) that another model built before would shift.
    """
    return {
        f"{name}/{kind}": tensors[parameter.name].numpy().copy()
        for name, parameter in model.named_parameters()
        for kind, tensors in optimizer._accumulators.items()
        if parameter.name in tensors
    }


def load_optimizer_state(model: nn.Layer, optimizer: TorchOptimizer, state: dict[str, np.ndarray]) -> None:
    """Restore what `optimizer_state` returned; raises UserError when it is another optimizer's or another model's.

    Paddle: see `optimizer_state`.
    """
    parameters = dict(model.named_parameters())
    names = dict.fromkeys(key.rpartition("/")[0] for key in state)
    odd = state.keys() ^ {f"{name}/{kind}" for name in names for kind in optimizer.ACCUMULATORS if name in parameters}
    if odd:
        raise UserError(f"the optimizer's state does not fit this optimizer and model (first: {min(odd)})")
    optimizer._accumulators.clear()
    for name in names:
        for kind, tensor in optimizer.create_accumulators(parameters[name]).items():
            # its stub says that it takes nothing
            tensor.copy_(paddle.to_tensor(state[f"{name}/{kind}"], place=tensor.place), True)  # type: ignore[call-arg]
