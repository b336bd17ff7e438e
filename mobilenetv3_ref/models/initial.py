"""The initial weights that both frameworks share."""

from torch import nn

from mobilenetv3_common.initial import draw_initial

from .weights import load_state_dict, to_arrays


def shared_init(model: nn.Module, seed: int) -> None:
    """Give every parameter of a MobileNetV3 the value that `draw_initial` draws; buffers stay as they are.

    Both packages' models are then equal to the last bit, whatever was created or drawn before.
    """
    arrays = to_arrays(model.state_dict())
    for name, array in arrays.items():
        if name.endswith(("weight", "bias")):
            arrays[name] = draw_initial(name, array.shape, seed)
    load_state_dict(model, arrays)
