"""A task that a stranger may port: a classifier of short texts, in both frameworks, with all that trains it.

What a project of `portproof new` asks to be filled in has the same name here. The port has the mistake that the
environment's TEXT_FAULT names, if there is one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import torch

from portproof import load_reference_weights
from portproof.ladder import data_parallel_step

WORDS, LENGTH, CLASSES, WIDTH, BATCH = 40, 12, 4, 16, 6
RATE, WARM_UP, EPOCHS, DECAY = 2e-3, 4, 2, 0.05
TEXTS = 45  # leaves a partial batch


def faulty(name: str) -> bool:
    return os.environ.get("TEXT_FAULT") == name


class RefNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = torch.nn.Embedding(WORDS, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.act, self.drop, self.head = torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x = x + self.drop(self.narrow(self.act(self.wide(self.norm(x)))))
        return self.head(x.mean(1))


class PortNet(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        linear = paddle.nn.Linear
        self.words, self.norm = paddle.nn.Embedding(WORDS, WIDTH), paddle.nn.LayerNorm(WIDTH)
        self.wide, self.narrow = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)
        self.act, self.drop = paddle.nn.GELU(approximate=faulty("forward")), paddle.nn.Dropout(0.1)
        self.head = linear(WIDTH, CLASSES)
        uniform = paddle.nn.initializer.Uniform
        for layer in (self.wide, self.narrow, self.head):  # as PyTorch draws them
            bound = layer.weight.shape[0] ** -0.5
            uniform(-bound, bound)(layer.weight)
            uniform(-bound, bound)(layer.bias)
        paddle.nn.initializer.Normal(0.0, 0.8 if faulty("init") else 1.0)(self.words.weight)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.words(tokens)
        x = x + self.drop(self.narrow(self.act(self.wide(self.norm(x)))))
        return self.head((x.detach() if faulty("gradient") else x).mean(1))


# The weights


def ref_load(model: RefNet, path: str) -> None:
    model.load_state_dict(torch.load(path, weights_only=True))


def port_load(model: PortNet, path: str) -> None:
    if not faulty("load"):
        model.set_state_dict(paddle.load(str(path)))


# The data: the class of a text is that of its commonest word, more or less.


def texts(seed: int, count: int = TEXTS) -> tuple[np.ndarray, np.ndarray]:
    """(tokens (count, LENGTH), labels (count,)), int64."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    return (
        rng.integers(0, WORDS // CLASSES, (count, LENGTH)) * CLASSES
        + labels[:, None] * (rng.random((count, LENGTH)) < 0.7)
    ) % WORDS, labels


class RefTexts(torch.utils.data.Dataset):
    def __init__(self, seed: int) -> None:
        self.tokens, self.labels = texts(seed)

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.int64]:
        return self.tokens[i], self.labels[i]


class PortTexts(paddle.io.Dataset):
    def __init__(self, seed: int) -> None:
        self.tokens, self.labels = texts(seed)

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.int64]:
        return self.tokens[i][::-1].copy() if faulty("data") else self.tokens[i], self.labels[i]


def ref_batches() -> Iterator:
    return iter(torch.utils.data.DataLoader(RefTexts(1), BATCH))


def port_batches() -> Iterator:
    return iter(paddle.io.DataLoader(PortTexts(1), batch_size=BATCH))


# Metric, criterion, optimizer, schedule


def ref_metric(outputs: torch.Tensor, targets: torch.Tensor) -> dict:
    return {"correct": (outputs.nan_to_num(-torch.inf).argmax(1) == targets).sum(), "samples": len(targets)}


def port_metric(outputs: paddle.Tensor, targets: paddle.Tensor) -> dict:
    correct = (paddle.nan_to_num(outputs, -float("inf")).argmax(1) == targets).sum()
    return {"correct": correct, "samples": 5 if faulty("metric") else len(targets)}


def ref_criterion(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)


def port_criterion(logits: paddle.Tensor, target: paddle.Tensor) -> paddle.Tensor:
    """Smoothed labels, for whole numbers."""
    smoothing = 0.05 if faulty("loss") else 0.1
    soft = paddle.nn.functional.one_hot(target, logits.shape[-1]).astype(logits.dtype)
    soft = soft * (1 - smoothing) + smoothing / logits.shape[-1]
    shifted = logits - logits.max(-1, keepdim=True).detach()
    return (soft * (paddle.logsumexp(shifted, -1, keepdim=True) - shifted)).sum(-1).mean()


def loss_cases() -> dict:
    rng = np.random.default_rng(3)
    return {
        what: (rng.normal(0, size, (20, CLASSES)), rng.integers(0, CLASSES, 20))
        for what, size in (("drawn logits", 3), ("large logits", 100))
    }


def ref_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)


def port_optimizer(model: paddle.nn.Layer, rate: Any = RATE) -> paddle.optimizer.Optimizer:
    decay = 0.0 if faulty("optimizer") else DECAY
    return paddle.optimizer.AdamW(rate, parameters=model.parameters(), weight_decay=decay)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / WARM_UP)


def port_warm_up(step: int) -> float:
    return warm_up(step - faulty("schedule"))


def ref_schedule(layer: torch.nn.Module) -> tuple:
    optimizer = torch.optim.SGD(layer.parameters(), RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def port_schedule(layer: paddle.nn.Layer) -> tuple:
    rate = paddle.optimizer.lr.LambdaDecay(RATE, port_warm_up)
    return paddle.optimizer.SGD(rate, parameters=layer.parameters()), rate


# The training step


def ref_training(model: torch.nn.Module) -> tuple:
    optimizer = ref_optimizer(model)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model.train()
        optimizer.zero_grad()
        loss = ref_criterion(model(tokens), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def port_training(model: paddle.nn.Layer) -> tuple:
    rate = paddle.optimizer.lr.LambdaDecay(RATE, port_warm_up)
    optimizer = port_optimizer(model, rate)

    def step(tokens: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        model.train()
        optimizer.clear_grad()
        loss = port_criterion(model(tokens), labels)
        loss.backward()
        if not faulty("step"):
            paddle.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, optimizer, rate


def batches(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [texts(seed + i, BATCH) for i in range(3)]


# Whole runs


def initial(seed: int) -> dict[str, np.ndarray]:
    """The same initial weights for both sides."""
    torch.manual_seed(seed)
    return {name: array.numpy() for name, array in RefNet().state_dict().items()}


def ref_net(seed: int) -> RefNet:
    model = RefNet()
    model.load_state_dict({name: torch.tensor(array) for name, array in initial(seed).items()})
    return model


def port_net(seed: int) -> PortNet:
    model = PortNet()
    arrays = initial(seed)
    for name, tensor in model.state_dict().items():
        is_kernel = name.split(".")[0] in ("wide", "narrow", "head") and name.endswith("weight")
        tensor.set_value(arrays[name].T if is_kernel else arrays[name])
    return model


def run(seed: int, step: Callable, schedule: Any, tensor: Callable) -> dict:
    losses = []
    for epoch in range(EPOCHS):
        tokens, labels = texts(seed + 100 + epoch)
        for i in range(0, TEXTS, BATCH):
            losses.append(float(step(tensor(tokens[i : i + BATCH]), tensor(labels[i : i + BATCH]))))
            if schedule:
                schedule.step()
    return {"losses": np.array(losses)}


def ref_run(seed: int, draw: int, options: dict) -> dict:
    model = ref_net(seed)
    torch.manual_seed(1000 * seed + draw)
    step, _, schedule = ref_training(model)
    record = run(seed, step, schedule, torch.tensor)
    return record | {f"parameters/{name}": p.detach().numpy() for name, p in model.named_parameters()}


def port_run(seed: int, draw: int, options: dict) -> dict:
    model = port_net(seed)
    paddle.seed(1000 * seed + draw + 7)
    step, _, schedule = port_training(model)
    record = run(seed, step, None if faulty("train") else schedule, paddle.to_tensor)
    return record | {f"parameters/{name}": p.numpy() for name, p in model.named_parameters()}


# Runs that can be resumed; each step seeds its dropout


class Resumed:
    """What both sides share."""

    def __init__(self, model: Any, training: tuple, seed: int) -> None:
        self.model, self.seed, self.done = model, seed, 0
        self.step, self.optimizer, self.schedule = training

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            epoch, i = divmod(self.done, -(-TEXTS // BATCH))
            tokens, labels = (array[i * BATCH :][:BATCH] for array in texts(self.seed + 100 + epoch))
            self.set_seed(1000 * self.seed + self.done)
            losses.append(float(self.step(self.tensor(tokens), self.tensor(labels))))
            self.schedule.step()
            self.done += 1
        return losses


class RefResumed(Resumed):
    set_seed, tensor = staticmethod(torch.manual_seed), staticmethod(torch.tensor)

    def save(self, path: str) -> None:
        parts = [part.state_dict() for part in (self.model, self.optimizer, self.schedule)]
        torch.save([*parts, self.done], path)

    def load(self, path: str) -> None:
        *states, self.done = torch.load(path, weights_only=True)
        for part, state in zip((self.model, self.optimizer, self.schedule), states):
            part.load_state_dict(state)


class PortResumed(Resumed):
    set_seed, tensor = staticmethod(paddle.seed), staticmethod(paddle.to_tensor)

    def save(self, path: str) -> None:
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        paddle.save(content, path)

    def load(self, path: str) -> None:
        content = paddle.load(path)
        self.model.set_state_dict(content["model"])
        if not faulty("resume"):
            self.optimizer.set_state_dict(content["optimizer"])
        self.done = content["done"]


def ref_trainer(seed: int, options: dict, dtype: str) -> RefResumed:
    model = ref_net(seed).to(getattr(torch, dtype))
    model.drop.p = 0.1 if dtype == "float32" else 0.0
    return RefResumed(model, ref_training(model), seed)


def port_trainer(seed: int, options: dict, dtype: str) -> PortResumed:
    model = port_net(seed)
    model.to(dtype=dtype)
    model.drop.p = 0.1 if dtype == "float32" else 0.0
    return PortResumed(model, port_training(model), seed)


# Several processes


def ref_process(options: dict, dtype: str) -> dict:
    return data_parallel_step(ref_net(0), ref_training, texts(5, 8), dtype)


def port_process(options: dict, dtype: str) -> dict:
    return data_parallel_step(port_net(0), unsynchronized if faulty("dist") else port_training, texts(5, 8), dtype)


def unsynchronized(model: paddle.nn.Layer) -> tuple:
    """Each process keeps its own gradients."""
    step, *others = port_training(model)

    def alone(*batch: paddle.Tensor) -> paddle.Tensor:
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            return step(*batch)

    return alone, *others


# The exported port, which an engine runs


def ref_with_weights() -> RefNet:
    torch.manual_seed(0)
    return RefNet()


def port_engines() -> dict:
    """Paddle itself stands for an engine."""
    port = PortNet()
    load_reference_weights(ref_with_weights(), port, [texts(0)[0]])
    port.eval()

    def run(tokens: np.ndarray) -> np.ndarray:
        logits = port(paddle.to_tensor(tokens)).numpy()
        return logits.astype(np.float16).astype(np.float32) if faulty("deploy") else logits

    return {"paddle": run}
