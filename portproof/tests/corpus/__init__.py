"""Small pairs of a PyTorch reference and a PaddlePaddle port, of the kinds that people port.

Each port is written as its author would, from the reference's source, and takes the name of a bug: "" is the faithful
port, any other name has that one bug and no other. What is constructed otherwise than in the reference (names, fused
weights, signatures, functions for layers) is no bug.
"""

from corpus import attention, convnets, images, outputs, recurrent, text, vectors
from corpus.common import Bug, Pair

__all__ = ["PAIRS", "Bug", "Pair"]

PAIRS: dict[str, Pair] = {}
for _file in (attention, convnets, images, outputs, recurrent, text, vectors):
    assert not PAIRS.keys() & _file.PAIRS.keys(), "two pairs of one name"
    PAIRS |= _file.PAIRS
