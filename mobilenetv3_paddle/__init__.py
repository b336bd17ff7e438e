"""MobileNetV3 in PaddlePaddle: the port, the mirror image of `mobilenetv3_ref`."""

import portproof  # noqa: F401  before paddle is imported: it silences a warning of Paddle's import
