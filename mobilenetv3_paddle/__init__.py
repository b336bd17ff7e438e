"""MobileNetV3 in PaddlePaddle: the port, the mirror image of `mobilenetv3_ref`."""
