"""Which module, tensor and call of the port stands for which of the reference."""
