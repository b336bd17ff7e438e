"""What rung 08 runs: a package's own training command, recorded. `ref` and `port` are callables for `ladder.dist`."""

import io
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from typing import Any, TextIO
from unittest import mock

import numpy as np

from mobilenetv3_common.arguments import get_args_parser
from mobilenetv3_common.classes import num_classes_of
from mobilenetv3_proof.package import PORT, REF, Package
from portproof.compare import Item, tensor_item
from portproof.ladder.workers import join_group
from sturdyio.files import load_safetensors

TWO_MODES = ("BatchNorm2d", "Dropout")  # layers that do something else in train mode
METRIC_KINDS = {"loss": "loss", "samples": "samples"}  # of an evaluation


class Copied(io.StringIO):
    """Text that goes to another stream, too."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self.stream.flush()


class Recorder:
    """Records one run of `PACKAGE.train.main`, from inside, while its functions do what they do.

    Items, in the order in which they arise, by the reference's names; those of an epoch's batch have it as their
    iteration. Of this process alone are images and the "own" ones:

        section         kind            name
        epoch E         images          images      the indices that it trains on, (n,)
        epoch E         own loss        loss        its mean over them
        epoch E         gradient        NAME        where the optimizer steps: what the processes have averaged, and
                                                    clipped; on process 0, and on the others it shows in the parameters
        epoch E         own buffer      NAME        batch norm's statistics at the end of the epoch
        epoch E         mode            layers in train mode    how many of each type of TWO_MODES, text
        epoch E         parameter, buffer, NAME     the model that is evaluated and saved
        epoch E         samples, metric, loss       of its evaluation; section "evaluation" where nothing is trained
        epoch E, averaged ...                       the same of its moving average
        the last one    own lines       log lines   how many this process prints
    """

    def __init__(self, package: str, dtype: str) -> None:
        self.package, self.dtype = Package(package), dtype
        self.backend = self.package.backend
        self.training, self.trainer, self.engine = map(
            self.package.module, ("train.main", "train.trainer", "train.engine")
        )
        self.record: dict[Item, np.ndarray] = {}
        self.model: Any = None
        self.epoch = "evaluation"
        self.batches: Iterator[tuple[int, list[int]]] = iter(())

    def keep(self, kind: str, arrays: Mapping[str, Any], **facts) -> None:
        """Tensors by their state_dict keys, or values by their names."""
        facts = {"section": self.epoch, **facts}
        self.record.update({tensor_item(name, kind, **facts): np.asarray(array) for name, array in arrays.items()})

    def build(self, build: Any, *, weights: str, num_classes: int, dropout: float) -> Any:
        """The model that main asks for, in the precision of this record; its classes are those of the weights."""
        arrays = load_safetensors(weights)
        factory = partial(build, num_classes=num_classes_of(arrays), dropout=dropout)
        self.model = self.package.build(factory, arrays, self.dtype)
        to_array, to_tensor = self.backend.to_array, self.backend.to_tensor
        self.model.register_forward_pre_hook(lambda model, inputs: to_tensor(to_array(inputs[0]), model))
        return self.model

    def train_step(self, train_step: Any, *args, accumulation: tuple[int, int] = (0, 1), **kwargs) -> tuple:
        loss, output = train_step(*args, accumulation=accumulation, **kwargs)
        batch, indices = next(self.batches)
        self.keep("images", {"images": np.array(indices, int)}, iteration=batch)
        self.keep("own loss", {"loss": self.backend.to_array(loss)}, iteration=batch)
        if accumulation[0] == accumulation[1] - 1 and self.training.launched_rank()[0] == 0:
            self.keep("gradient", self.backend.arrays_of(self.model).gradients(), iteration=batch)
        return loss, output

    def train_one_epoch(self, train_one_epoch: Any, *args, **kwargs) -> None:
        _, _, _, loader, _, epoch, *_ = args
        self.epoch, self.batches = f"epoch {epoch}", enumerate(list(loader.batch_sampler))
        train_one_epoch(*args, **kwargs)
        self.keep("own buffer", self.backend.arrays_of(self.model).buffers())
        self.keep("mode", {"layers in train mode": self.trained_layers()})

    def trained_layers(self) -> str:
        """Such as "34 BatchNorm2d, 1 Dropout"."""
        modules = [module for _, module in self.backend.layers.named_modules(self.model) if module.training]
        counts = Counter(map(self.backend.layers.kind, modules))
        return ", ".join(f"{counts[kind]} {kind}" for kind in TWO_MODES)

    def evaluate(self, evaluate: Any, model: Any, *args) -> dict[str, float]:
        metrics = evaluate(model, *args)
        section = self.epoch if model is self.model else f"{self.epoch}, averaged"
        if self.epoch != "evaluation":
            arrays = self.backend.arrays_of(model)
            self.keep("parameter", arrays.parameters(), section=section)
            self.keep("buffer", arrays.buffers(), section=section)
        for name, value in metrics.items():
            self.keep(METRIC_KINDS.get(name, "metric"), {name: np.float64(value)}, section=section)
        return metrics

    @contextmanager
    def patches(self) -> Iterator[None]:
        """In this context the package's functions are recorded, and all runs share one group of processes."""
        init, shut_down = self.training.init_distributed, self.training.shut_down
        join: dict[str, Any] = {"init_distributed": lambda device: join_group(partial(init, device), shut_down)}
        join["shut_down"] = mock.Mock()
        models = {name: partial(self.build, build) for name, build in self.training.MODELS.items()}
        functions = (
            (self.training, "evaluate"),
            (self.trainer, "evaluate"),
            (self.trainer, "train_one_epoch"),
            (self.engine, "train_step"),
        )
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(self.training, MODELS=models, **join))
            for module, name in functions:
                recorded = partial(getattr(self, name), getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, recorded))
            stack.enter_context(self.backend.runs.exact_constants())
            yield

    def run(self, flags: Sequence[str]) -> dict[Item, np.ndarray]:
        """What `python -m PACKAGE.train FLAGS` does, in this process: the items above.

        `--batch-size` is that of all processes together, `--weights` a .safetensors file of the reference's names.
        """
        args = get_args_parser("train", "either").parse_args(flags)
        args.batch_size //= self.training.launched_rank()[2]
        printed = Copied(sys.stdout)
        with tempfile.TemporaryDirectory() as args.output_dir, self.patches(), redirect_stdout(printed):
            self.training.main(args)
        lines = sum(line.startswith("[") for line in printed.getvalue().splitlines())  # see mobilenetv3_common.log
        self.keep("own lines", {"log lines": lines}, section=list(self.record)[-1].section)
        return self.record


def ref(flags: Sequence[str], dtype: str) -> dict[Item, np.ndarray]:
    """One run of the reference's training command."""
    return Recorder(REF, dtype).run(flags)


def port(flags: Sequence[str], dtype: str) -> dict[Item, np.ndarray]:
    """One run of the port's training command."""
    return Recorder(PORT, dtype).run(flags)
