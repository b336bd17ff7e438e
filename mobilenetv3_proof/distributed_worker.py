"""One process of several: a package's own training command in float64, recorded. Started by `distributed.launch`.

    LAUNCHER -m mobilenetv3_proof.distributed_worker FOLDER

FOLDER/job.json is {"package": ..., "runs": {name: flags}}, where `--weights` is a .safetensors file of
the reference's names for either package. Each process writes FOLDER/RANK.log (all that it prints), FOLDER/RANK.stage
(how far it came) and FOLDER/RANK.NAME.npz (what `recorded_run` returns).
"""

import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from mobilenetv3_common.arguments import get_args_parser
from mobilenetv3_common.classes import num_classes_of
from mobilenetv3_proof.package import Package
from portproof.compare import Item, tensor_item
from portproof.io.files import load_safetensors

METRIC_KINDS = {"loss": "loss", "samples": "samples"}  # of an evaluation
STARTED, JOINING, JOINED, ENDED = "started", "joining", "joined", "ended"


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
        epoch E         parameter, buffer, NAME     the model that is evaluated and saved
        epoch E         samples, metric, loss       of its evaluation; section "evaluation" where nothing is trained
        epoch E, averaged ...                       the same of its moving average
    """

    def __init__(self, package: str, dtype: str) -> None:
        self.package, self.dtype = Package(package), dtype
        self.backend = self.package.backend
        self.training, self.trainer, self.engine = map(
            self.package.module, ("train.main", "train.trainer", "train.engine")
        )
        self.dtype = dtype
        self.record: dict[Item, np.ndarray] = {}
        self.model: Any = None
        self.epoch = "evaluation"
        self.batches: Iterator[tuple[int, list[int]]] = iter(())

    def keep(self, kind: str, arrays: Mapping[str, Any], **facts) -> None:
        """Tensors by their state_dict keys, or values by their names."""
        facts = {"section": self.epoch, "dtype": self.dtype, **facts}
        self.record.update({tensor_item(name, kind, **facts): np.asarray(array) for name, array in arrays.items()})

    def build(self, build: Any, *, weights: str, num_classes: int, dropout: float) -> Any:
        """The model that main asks for, in the precision of this record; its classes are those of the weights."""
        arrays = load_safetensors(weights)
        factory = partial(build, num_classes=num_classes_of(arrays), dropout=dropout)
        self.model = self.package.build(factory, arrays, self.dtype)
        self.backend.round_epsilons(self.model)  # of the synchronized batch norm
        to_array, to_tensor = self.backend.to_array, self.backend.to_tensor
        self.model.register_forward_pre_hook(lambda model, inputs: to_tensor(to_array(inputs[0]), model))
        return self.model

    def train_step(self, train_step: Any, *args, accumulation: tuple[int, int] = (0, 1), **kwargs) -> tuple:
        loss, output = train_step(*args, accumulation=accumulation, **kwargs)
        batch, indices = next(self.batches)
        self.keep("images", {"images": np.array(indices, int)}, iteration=batch)
        self.keep("own loss", {"loss": self.backend.to_array(loss)}, iteration=batch)
        if accumulation[0] == accumulation[1] - 1 and self.training.launched_rank()[0] == 0:
            self.keep("gradient", self.backend.gradients(self.model), iteration=batch)
        return loss, output

    def train_one_epoch(self, train_one_epoch: Any, *args, **kwargs) -> None:
        _, _, _, loader, _, epoch, *_ = args
        self.epoch, self.batches = f"epoch {epoch}", enumerate(list(loader.batch_sampler))
        train_one_epoch(*args, **kwargs)
        self.keep("own buffer", self.backend.buffers(self.model))

    def evaluate(self, evaluate: Any, model: Any, *args) -> dict[str, float]:
        metrics = evaluate(model, *args)
        section = self.epoch if model is self.model else f"{self.epoch}, averaged"
        if self.epoch != "evaluation":
            self.keep("parameter", self.backend.parameters(model), section=section)
            self.keep("buffer", self.backend.buffers(model), section=section)
        for name, value in metrics.items():
            self.keep(METRIC_KINDS.get(name, "metric"), {name: np.float64(value)}, section=section)
        return metrics

    @contextmanager
    def patches(self) -> Iterator[None]:
        """In this context the package's functions are recorded."""
        models = {name: partial(self.build, build) for name, build in self.training.MODELS.items()}
        functions = (
            (self.training, "evaluate"),
            (self.trainer, "evaluate"),
            (self.trainer, "train_one_epoch"),
            (self.engine, "train_step"),
        )
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(self.training, "MODELS", models))
            for module, name in functions:
                recorded = partial(getattr(self, name), getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, recorded))
            stack.enter_context(self.backend.exact_constants())
            yield


def recorded_run(package: str, flags: Sequence[str], dtype: str = "float64") -> dict[Item, np.ndarray]:
    """What `python -m PACKAGE.train FLAGS` does, in this process: the items of `Recorder`."""
    recorder = Recorder(package, dtype)
    with recorder.patches():
        recorder.training.main(get_args_parser("train", "either").parse_args(flags))
    return recorder.record


@contextmanager
def one_group(training: ModuleType, stage: Any) -> Iterator[None]:
    """All runs share the group of processes that the first one makes: no framework promises that of a second."""
    init_distributed, made = training.init_distributed, []

    def join(device: Any) -> None:
        if not made:
            stage(JOINING)
            init_distributed(device)
            stage(JOINED)
            made.append(True)

    with mock.patch.object(training, "init_distributed", join), mock.patch.object(training, "shut_down"):
        yield


def end_with_parent() -> None:
    """End this process when the one that holds the other end of stdin does, however that ends."""

    def watch() -> None:
        os.read(0, 1)  # nothing is ever written
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> None:
    rank = os.environ.get("PADDLE_TRAINER_ID") or os.environ["RANK"]
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    end_with_parent()

    def stage(name: str) -> None:
        (folder / f"{rank}.stage").write_text(name)

    stage(STARTED)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    training = importlib.import_module(f"{job['package']}.train.main")
    with one_group(training, stage):
        for name, flags in job["runs"].items():
            record = recorded_run(job["package"], flags)
            np.savez(folder / f"{rank}.part.npz", **{json.dumps(vars(item)): array for item, array in record.items()})
            (folder / f"{rank}.part.npz").rename(folder / f"{rank}.{name}.npz")
    training.shut_down()
    stage(ENDED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
