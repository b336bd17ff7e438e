"""The port's side of a comparison: the same functions as in capture_torch.py, results under the reference's names."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from mobilenetv3_paddle.models.weights import load_state_dict, to_arrays
from reprod.recipe.cli import UserError

from .convert import paddle_to_torch, torch_to_paddle
from .exact_paddle import exact_constants
from .gates import BENDS
from .recording import Call, Recording, call_label, map_tensors, tensors_at, tensors_in
from .report import one_line


def build(
    factory: Callable[[], nn.Layer], arrays: Mapping[str, np.ndarray], dtype: str, device: str, types: Mapping[str, str]
) -> nn.Layer:
    """`factory()` with the reference's weights `arrays`, in "float32" or "float64"; `types` are its layer types."""
    paddle.set_device(device)
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)  # layers keep the dtype that they are built under
    try:
        model = factory()
    finally:
        paddle.set_default_dtype(before)
    arrays = torch_to_paddle(arrays, types)
    load_state_dict(model, {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in arrays.items()})
    return model


def is_container(module: nn.Layer) -> bool:
    """Whether its output is only its last child's."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def to_array(tensor: paddle.Tensor) -> np.ndarray:
    """A copy of `tensor`, which a later operation in place cannot change."""
    return tensor.detach().numpy().copy()


def _arrays(value: Any) -> Any:
    return map_tensors(value, paddle.is_tensor, to_array)


def _scale(value: Any) -> float:
    floats = [tensor for tensor in tensors_in(value, paddle.is_tensor) if tensor.is_floating_point() and tensor.size]
    return max((float(tensor.detach().abs().max()) for tensor in floats), default=0.0)


@contextmanager
def recording(model: nn.Layer, whole: str = "logits", calls: bool = False) -> Iterator[Recording]:
    """Record every forward pass of `model` in this context, in float64 with exact constants.

    The whole model's output is called `whole`. With `calls` the arguments of every call are kept too, and after a
    backward pass in this context the loss's gradients for what it returned.
    """
    record, handles, running, counts = Recording(), [], [], {}

    def before(name: str, is_gate: bool) -> Callable:
        def hook(module: nn.Layer, args: tuple, kwargs: dict) -> None:
            call = Call(name, counts.get(name, 0), start=sum(counts.values()), scale=_scale((args, kwargs)))
            if calls or is_gate:
                call.args, call.kwargs = _arrays(args), _arrays(kwargs)
            counts[name] = call.number + 1
            running.append(call)

        return hook

    def after(is_gate: bool) -> Callable:
        def hook(module: nn.Layer, args: tuple, kwargs: dict, output: Any) -> None:
            call, tensors = running.pop(), tensors_at(output, paddle.is_tensor)
            call.places, call.outputs = list(tensors), [to_array(tensor) for tensor in tensors.values()]
            call.upstream = [None] * len(tensors)
            record.add(call, is_gate, whole, calls)
            for i, tensor in enumerate(tensors.values() if calls else ()):
                if not tensor.stop_gradient:
                    tensor.register_hook(lambda gradient, i=i: call.upstream.__setitem__(i, to_array(gradient)))

        return hook

    for name, module in model.named_sublayers(include_self=True):
        if name == "" or not is_container(module):
            is_gate = type(module).__name__ in BENDS
            handles.append(module.register_forward_pre_hook(before(name, is_gate), with_kwargs=True))
            handles.append(module.register_forward_post_hook(after(is_gate), with_kwargs=True))
    try:
        with exact_constants():
            yield record
    finally:
        for handle in handles:
            handle.remove()
        for call in reversed(running if calls else ()):  # what was running when the model raised, the innermost first
            record.calls[call_label(call.name or whole, call.number)] = call


def to_tensor(array: np.ndarray, model: nn.Layer) -> paddle.Tensor:
    """`array` on the model's device, in the model's precision if it is floating point."""
    return paddle.to_tensor(array, dtype=model.parameters()[0].dtype if array.dtype.kind == "f" else None)


@paddle.no_grad()
def run_forward(model: nn.Layer, images: np.ndarray, train: bool, types: Mapping[str, str]) -> Recording:
    """One forward pass of `images` (N, 3, H, W); in train mode with the batch-norm buffers after it.

    A port that raises is recorded up to there, so that the first module without an output is the one that raised.
    """
    model.train() if train else model.eval()
    with recording(model) as record:
        try:
            model(to_tensor(images, model))
        except Exception as error:  # whatever a wrong port may raise
            record.error = one_line(error)
    if train and not record.error:
        record.buffers = buffers(model, types)
    return record


def buffers(model: nn.Layer, types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Batch norm's running statistics and counts."""
    arrays = {name: tensor for name, tensor in model.state_dict().items() if tensor.stop_gradient}
    return paddle_to_torch(to_arrays(arrays), types)


def parameters(model: nn.Layer, types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """All trained parameters."""
    arrays = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
    return paddle_to_torch(to_arrays(arrays), types)


def gradients(model: nn.Layer, types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The gradients of all trained parameters; one that received none is missing."""
    arrays = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return paddle_to_torch(to_arrays(arrays), types)


def shapes(model: nn.Layer, types: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all parameters and buffers as the reference would store them.

    One of a layer that the reference does not have keeps its own name, which a comparison will then show.
    """
    result = {}
    for name, array in to_arrays(model.state_dict()).items():
        try:
            converted = paddle_to_torch({name: array}, types)
        except UserError:
            converted = {name: array}
        result.update({key: value.shape for key, value in converted.items()})
    return result


def loss_and_gradient(
    criterion: nn.Layer, logits: np.ndarray, labels: np.ndarray, device: str
) -> dict[str, np.ndarray]:
    """The criterion's loss, and its gradient with respect to the logits (N, C), in their precision."""
    x = paddle.to_tensor(logits, place=device, stop_gradient=False)
    loss = criterion(x, paddle.to_tensor(labels, place=device))
    loss.backward()
    return {"loss": loss.numpy(), "gradient": x.grad.numpy()}
