"""Match the port's modules, tensors and calls with the reference's."""
