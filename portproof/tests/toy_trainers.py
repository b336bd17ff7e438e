"""Toys for `ladder.resume`: a small net with dropout and a buffer, trained on numbers, that can be resumed.

The port has the mistake that options["fault"] names, the reference that of options["ref_fault"].
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
import torch

IMAGES, BATCH, EPOCH = 22, 6, 4  # batches an epoch, the last of 4 images
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.5


class RefNet(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(5, 8), torch.nn.Linear(8, 1)
        self.drop = torch.nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.125)
        return self.two(self.drop(torch.sin(self.one(x - self.mean))))


class PortNet(paddle.nn.Layer):
    def __init__(self, dropout: float, first: str) -> None:
        super().__init__()
        self.first = first
        setattr(self, first, paddle.nn.Linear(5, 8))
        self.two = paddle.nn.Linear(8, 1)
        self.drop = paddle.nn.Dropout(dropout)
        self.register_buffer("mean", paddle.zeros([5]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """In either mode as in train mode, but for dropout."""
        self.mean.set_value(self.mean * 0.875 + x.mean(0) * 0.125)
        return self.two(self.drop(paddle.sin(getattr(self, self.first)(x - self.mean))))


def initial(seed: int) -> dict[str, np.ndarray]:
    """Weights (out, in) and biases of the two linear layers."""
    rng = np.random.default_rng([seed, 1])
    shapes = {"one.weight": (8, 5), "one.bias": (8,), "two.weight": (1, 8), "two.bias": (1,)}
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


class Trainer:
    """What both sides share: data, where they are, and their mistakes."""

    kept: ClassVar[dict[str, Any]] = {}  # in the process

    def __init__(self, seed: int, fault: str) -> None:
        self.seed, self.fault, self.step, self.loaded_at = seed, fault, 0, None
        self.seen: list[int] = []
        rng = np.random.default_rng(seed)
        self.x, self.y = (rng.normal(size=(IMAGES, n)).astype(np.float32) for n in (5, 1))

    def indices(self) -> list[int]:
        step = self.step
        if self.fault == "sampler" and self.loaded_at is not None:
            step = self.loaded_at // EPOCH * EPOCH + len(self.seen)  # the epoch begun anew
        epoch, batch = divmod(step, EPOCH)
        order = np.random.default_rng([self.seed, epoch]).permutation(IMAGES)
        return order[batch * BATCH : (batch + 1) * BATCH].tolist()

    def batches(self, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(steps):
            chosen = self.indices()
            self.seen.append(sum(chosen))
            yield self.x[chosen], self.y[chosen]
            self.step += 1
            if self.step % EPOCH == 0:
                self.schedule.step()

    def kinds(self) -> dict[str, Any]:
        """What the file has of each kind."""
        raise NotImplementedError

    def put(self, content: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def save(self, path: str) -> None:
        content = {kind: value for kind, value in self.kinds().items() if kind != self.fault}
        Trainer.kept = content
        Path(path).write_bytes(b"" if self.fault == "empty file" else pickle.dumps(content | {"step": self.step}))

    def load(self, path: str) -> None:
        data = Path(path).read_bytes()
        content = pickle.loads(data) if data else {**Trainer.kept, "step": 0}
        self.step = self.loaded_at = content["step"]
        self.put(content)

    def state(self) -> dict[str, Any]:
        return {} if self.fault == "no seen" else {"sampler/sum of indices": self.seen}


class RefTrainer(Trainer):
    def __init__(self, seed: int, options: Mapping[str, Any], dtype: str) -> None:
        super().__init__(seed, options.get("ref_fault", ""))
        torch.manual_seed(seed if self.fault != "unseeded" else np.random.default_rng().integers(2**31))
        self.model = RefNet(0.2 if dtype == "float32" else 0.0)
        self.model.load_state_dict({k: torch.from_numpy(a) for k, a in initial(seed).items()}, strict=False)
        self.model.to(torch.float32 if self.fault == "float32" else getattr(torch, dtype))
        rate = options.get("rate", RATE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate, MOMENTUM)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, DECAY)
        if self.fault == "no model":
            del self.model

    def train(self, steps: int) -> list[float]:
        losses = []
        for x, y in self.batches(steps):
            loss = ((self.model(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses[1:] if self.fault == "losses" else losses

    def kinds(self) -> dict[str, Any]:
        parts = {"weights": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return {kind: part.state_dict() for kind, part in parts.items()} | {"random": torch.get_rng_state()}

    def put(self, content: Mapping[str, Any]) -> None:
        parts = {"weights": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        for kind in parts.keys() & content.keys():
            parts[kind].load_state_dict(content[kind])
        if "random" in content:
            torch.set_rng_state(content["random"])


class PortTrainer(Trainer):
    """Its dropout is seeded at each step."""

    def __init__(self, seed: int, options: Mapping[str, Any], dtype: str) -> None:
        super().__init__(seed, options.get("fault", ""))
        if self.fault == "raises":
            raise ValueError("no such numbers")
        first = options.get("first", "one")
        self.model = PortNet(0.2 if dtype == "float32" else 0.0, first)
        arrays = initial(seed)
        for name, layer in (("one", getattr(self.model, first)), ("two", self.model.two)):
            layer.weight.set_value(arrays[f"{name}.weight"].T)
            layer.bias.set_value(arrays[f"{name}.bias"])
        self.model.to(dtype=dtype)
        rate = options.get("rate", RATE) * (1 + 1e-6 * (self.fault == "rate"))
        self.schedule = paddle.optimizer.lr.StepDecay(rate, 1, DECAY)
        self.optimizer = paddle.optimizer.Momentum(self.schedule, MOMENTUM, self.model.parameters())

    def train(self, steps: int) -> list[float]:
        losses = []
        if self.fault == "eval mode":
            self.model.eval()
        for x, y in self.batches(steps):
            done = len(losses) if self.fault == "random" else self.step
            paddle.seed(self.seed + 100 * done)
            loss = ((self.model(paddle.to_tensor(x)) - paddle.to_tensor(y)) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            losses.append(loss.item())
        return losses

    def kinds(self) -> dict[str, Any]:
        state = {key: value for key, value in self.optimizer.state_dict().items() if key != "LR_Scheduler"}
        found = {"weights": self.model.state_dict(), "optimizer": state}
        return {kind: {k: t.numpy() for k, t in it.items()} for kind, it in found.items()} | {
            "schedule": self.schedule.state_dict()
        }

    def put(self, content: Mapping[str, Any]) -> None:
        weights = {k: a for k, a in content["weights"].items() if self.fault != "buffer" or not k.startswith("mean")}
        self.model.set_state_dict(weights)
        if "optimizer" in content:
            own = self.optimizer.state_dict() | content["optimizer"]
            self.optimizer.set_state_dict({"LR_Scheduler": self.schedule.state_dict()} | own)
        if "schedule" in content:
            self.schedule.set_state_dict(content["schedule"])
        if self.fault == "mode":
            self.model.eval()


ref, port = RefTrainer, PortTrainer
