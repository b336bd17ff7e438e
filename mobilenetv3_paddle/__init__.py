"""MobileNetV3 in PaddlePaddle: the port, the mirror image of `mobilenetv3_ref`."""

import warnings

# Paddle looks for a compiler cache when it is imported, and warns on every run where there is none.
warnings.filterwarnings("ignore", message="No ccache found")
