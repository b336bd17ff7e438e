"""The initial weights that both frameworks share."""

import numpy as np
from paddle import nn

from mobilenetv3_common.initial import draw_initial

from .weights import load_state_dict, to_arrays


def shared_init(model: nn.Layer, seed: int) -> None:
    """Give every parameter of a MobileNetV3 the value that `draw_initial` draws; buffers stay as they are.

    Both packages' models are then equal to the last bit, whatever was created or drawn before.
    """
    arrays = to_arrays(model.state_dict())
    for name, array in arrays.items():
        if name.endswith(("weight", "bias")):
            layout = np.transpose if array.ndim == 2 else np.asarray  # Paddle: linear weights are (C_in, C_out)
            arrays[name] = layout(draw_initial(name, layout(array).shape, seed))
    load_state_dict(model, arrays)
