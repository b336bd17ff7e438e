"""Training runs of one package, from its own loaders, training loop and evaluation, each reduced to a record of arrays.

    python -m reprod.align.trajectory_worker FOLDER PACKAGE

FOLDER/job.json is what `trajectory.launch` writes. FOLDER/PACKAGE.NAME.npz is the record of each run.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from reprod.recipe.seeds import derive_seed

PORT = "mobilenetv3_paddle"


@dataclass(frozen=True)
class Recipe:
    """What a run is trained with; both sides get the same."""

    model: str
    epochs: int
    batch_size: int = 16
    size: int = 48  # pixels; at 32 the last blocks have one, and batch norm next to nothing to average
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-3  # as large as shows within a hundred steps
    lr_gamma: float = 0.85  # once an epoch
    crop_scale: float = 0.8  # digits cut in half are other digits
    hflip_prob: float = 0.5

    def to_json(self) -> dict[str, str | float]:
        return asdict(self)


class Watched:
    """A criterion that keeps each batch's mean loss and share of right answers."""

    def __init__(self, criterion: Callable) -> None:
        self.criterion = criterion
        self.losses: list[float] = []
        self.right: list[float] = []

    def __call__(self, output: Any, target: Any) -> Any:
        loss = self.criterion(output, target)
        self.losses.append(loss.item())
        self.right.append(float((output.detach().numpy().argmax(1) == target.numpy()).mean()))
        return loss


class Side:
    """A package's own functions, and what of them is spelled differently."""

    def __init__(self, package: str, types: Mapping[str, str]) -> None:
        self.package = package
        self.port = package == PORT
        self.capture = importlib.import_module(f"reprod.align.capture_{'paddle' if self.port else 'torch'}")
        self.types = (types,) if self.port else ()
        self.data, self.models, self.device = map(self.module, ("data", "models", "device"))
        self.engine, self.criterion, self.optimizer = map(
            self.module, ("train.engine", "train.criterion", "train.optimizer")
        )
        self.cpu = self.device.select_device("cpu")

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    def parameters(self, model: Any) -> dict[str, np.ndarray]:
        return self.capture.parameters(model, *self.types)

    def buffers(self, model: Any) -> dict[str, np.ndarray]:
        return self.capture.buffers(model, *self.types)

    def loaders(self, data_path: str, recipe: Recipe, seed: int) -> tuple[Any, Any]:
        """Of training and of validation."""
        build, size = self.data.build_dataset, recipe.size
        augmentation = {"crop_scale": recipe.crop_scale, "hflip_prob": recipe.hflip_prob}
        train = build(data_path, train=True, crop_size=size, seed=seed, **augmentation)
        val = build(data_path, train=False, crop_size=size, resize_size=size)
        return (
            self.data.build_loader(train, recipe.batch_size, train=True, seed=seed),
            self.data.build_loader(val, 4 * recipe.batch_size, train=False),
        )

    def build_optimizer(self, model: Any, recipe: Recipe) -> tuple[Any, Any]:
        settings = {"lr": recipe.lr, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
        return self.optimizer.build_optimizer(model, **settings, lr_step_size=1, lr_gamma=recipe.lr_gamma)

    def lr(self, optimizer: Any) -> float:
        return optimizer.get_lr() if self.port else optimizer.param_groups[0]["lr"]

    def set_norm_share(self, model: Any, share: float) -> None:
        """The share of the new batch in every batch norm's running statistics."""
        for m in model.sublayers() if self.port else model.modules():
            if self.port and hasattr(m, "_variance"):
                m._momentum = 1 - share  # Paddle's momentum is the share of the old value
            elif not self.port and hasattr(m, "running_var"):
                m.momentum = share


def training_run(side: Side, data_path: str, recipe: Recipe, seed: int, draw: int) -> dict[str, np.ndarray]:
    """Train from the initial weights of `seed` on the batches of `seed`, with the `draw`-th series of dropout masks.

    losses, right    each batch's mean loss, and share of right answers, (epochs * batches,)
    lr, top1         each epoch's learning rate, and top-1 in eval mode behind it, (epochs,)
    parameters/NAME  at the end; moved/NAME: what the last epoch has changed
    running/NAME     batch norm's statistics at the end; reestimated/NAME: averaged over one more epoch's batches,
                     with the weights as they are at the end
    eval, reestimated_eval, mirrored_eval
                     (loss, top-1, images) of the validation images with the running statistics, with the re-estimated
                     ones, and with these and every image mirrored
    """
    model = side.models.MODELS[recipe.model](num_classes=10)  # with its dropout
    side.models.shared_init(model, seed)
    optimizer, lr_scheduler = side.build_optimizer(model, recipe)
    criterion = side.criterion.build_criterion()
    watched, (train_loader, val_loader) = Watched(criterion), side.loaders(data_path, recipe, seed)
    record: dict[str, Any] = {"lr": [], "top1": []}
    for epoch in range(recipe.epochs):
        side.device.seed_everything(derive_seed(seed, epoch, draw))
        side.data.set_epoch(train_loader, epoch)
        record["lr"].append(side.lr(optimizer))
        before = side.parameters(model)
        silent = side.engine.Hooks(log=lambda line: None)
        side.engine.train_one_epoch(model, watched, optimizer, train_loader, side.cpu, epoch, hooks=silent)
        lr_scheduler.step()
        record["eval"] = evaluate(side, model, criterion, val_loader)
        record["top1"].append(record["eval"][1])
    after = side.parameters(model)
    record |= {"losses": watched.losses, "right": watched.right}
    record |= {f"parameters/{name}": array for name, array in after.items()}
    record |= {f"moved/{name}": array - before[name] for name, array in after.items()}
    record |= {f"running/{name}": array for name, array in side.buffers(model).items()}
    side.data.set_epoch(train_loader, recipe.epochs)
    reestimate(side, model, train_loader)
    record |= {f"reestimated/{name}": array for name, array in side.buffers(model).items()}
    record["reestimated_eval"] = evaluate(side, model, criterion, val_loader)
    record["mirrored_eval"] = evaluate(side, model, criterion, mirrored(val_loader))
    return {name: np.array(value) for name, value in record.items()}


def evaluate(side: Side, model: Any, criterion: Any, loader: Any) -> tuple[float, float, float]:
    """(loss, top-1, images) of the package's own evaluation."""
    metrics = side.engine.evaluate(model, criterion, loader, side.cpu)
    return metrics["loss"], metrics["top1"], metrics["samples"]


def mirrored(loader: Any) -> Iterator[tuple[Any, Any]]:
    for image, label in loader:
        yield image.flip([3]), label


def reestimate(side: Side, model: Any, loader: Any) -> None:
    """Set the running statistics to the plain mean of those of the loader's batches."""
    model.train()
    for count, (image, _) in enumerate(loader, 1):
        side.set_norm_share(model, 1 / count)
        model(image)


def main(folder: Path, package: str) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if package != PORT:  # Paddle's number of threads is OMP_NUM_THREADS
        importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    side, recipe = Side(package, job["types"]), Recipe(**job["recipe"])
    for name, run in job["runs"][package].items():
        record = training_run(side, job["data_path"], recipe, **run)
        part = folder / f".{package}.{name}.npz"
        np.savez(part, **record)
        part.rename(folder / f"{package}.{name}.npz")
        print(f"{package} {name}: top-1 {record['top1'][-1]:.3f}, loss {record['losses'][-1]:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
