"""MobileNetV3 in its two sizes."""

from .initial import shared_init
from .mobilenet_v3 import MobileNetV3, mobilenet_v3_large, mobilenet_v3_small
from .weights import load_finetune, load_state_dict, load_weights, read_weights, save_weights

MODELS = {"mobilenet_v3_large": mobilenet_v3_large, "mobilenet_v3_small": mobilenet_v3_small}

__all__ = [
    "MODELS",
    "MobileNetV3",
    "load_finetune",
    "load_state_dict",
    "load_weights",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "read_weights",
    "save_weights",
    "shared_init",
]
