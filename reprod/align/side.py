"""One model as the comparison sees it, whichever framework it is of: its modules, its tensors, its runs, as arrays.

`side_torch.TorchSide` and `side_paddle.PaddleSide` implement it; nothing else touches a tensor. Framework-neutral.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .convert import Change
from .recording import Call, Recording


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer, as PyTorch would store it."""

    key: str  # in this side's own state_dict
    shape: tuple[int, ...]
    change: Change  # of layout, between this side's own and PyTorch's; its own inverse
    trained: bool  # it takes part in training: a parameter, no buffer


@dataclass(frozen=True)
class Module:
    """One module."""

    name: str
    type: str  # its class
    kind: str  # the library's layer that it is or derives from, by PyTorch's name; "" for none
    slots: dict[str, Slot]  # its own parameters and buffers, by PyTorch's name within the module
    is_leaf: bool


@dataclass
class Run:
    """One forward pass, and one backward pass if a cotangent was given. All arrays have PyTorch's layout."""

    record: Recording
    output: list[np.ndarray] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # by state_dict key; missing: it received none
    input_gradients: list[np.ndarray | None] = field(default_factory=list)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)  # after the pass, by state_dict key


class Side(Protocol):
    """A model of one framework, in float32; every run is done on a copy, so that none sees what another left."""

    modules: dict[str, Module]  # by dotted name, "" is the model

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters and buffers by state_dict key, in PyTorch's layout."""

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put `arrays` (as `arrays()` gives them) into the model; raises UserError for a key or shape that is not."""

    def run(
        self,
        inputs: Sequence[np.ndarray],
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        calls: bool = False,
    ) -> Run:
        """Run the model on `inputs` in "float32" or "float64"; dropout is off in either mode.

        With `cotangent` (an array an output) the gradients of sum(output * cotangent) are taken too. What a model
        raises ends the recording and is in `record.error`.
        """

    def run_module(self, name: str, call: Call, dtype: str, train: bool, backward: bool) -> Run:
        """Run only the module `name` on the arguments that `call` recorded, backward from its upstream gradients."""
