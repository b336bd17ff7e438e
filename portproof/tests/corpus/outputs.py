"""Models that differ in what they return, keep or send back: dataclasses, losses, masks, hooks, caches."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF

from corpus.common import Bug, Pair, normal

T, P = torch.nn, paddle.nn


# A dataclass between modules, a namedtuple at the end.


@dataclass
class Encoded:
    tokens: Any
    pooled: Any = None


Output = namedtuple("Output", "logits hidden")


class RefPooling(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.pool = T.Linear(5, 8), T.Linear(8, 8)

    def forward(self, x):
        y = self.inp(x)
        return Encoded(y, torch.tanh(self.pool(y[:, 0])))


class RefDataclass(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = RefPooling(), T.Linear(8, 3)

    def forward(self, x):
        found = self.encoder(x)
        return Output(self.head(found.pooled), found.tokens)


class PortPooling(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.inp, self.pool = bug, P.Linear(5, 8), P.Linear(8, 8)

    def forward(self, x):
        y = self.inp(x)
        return Encoded(y, paddle.tanh(self.pool(y[:, -1 if self.bug == "the last token" else 0])))


class PortDataclass(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.encoder, self.head = PortPooling(bug), P.Linear(8, 3)

    def forward(self, x):
        found = self.encoder(x)
        return Output(self.head(found.pooled), found.tokens)


# A loss.


class RefLoss(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = T.Linear(6, 8), T.Linear(8, 4)

    def forward(self, x, labels):
        return TF.cross_entropy(self.fc2(torch.tanh(self.fc1(x))), labels, ignore_index=3)


class PortLoss(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.ignored = -100 if bug == "a label not ignored" else 3
        self.fc1, self.fc2 = P.Linear(6, 8), P.Linear(8, 4)

    def forward(self, x, labels):
        return PF.cross_entropy(self.fc2(paddle.tanh(self.fc1(x))), labels, ignore_index=self.ignored)


# Logits, a mask of booleans and whole numbers.


class RefDetector(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = T.Linear(6, 8), T.Linear(8, 5)

    def forward(self, x):
        logits = self.out(torch.sigmoid(self.fc(x)))
        return {"logits": logits, "found": logits.sigmoid() > 0.5, "best": logits.argmax(-1)}


class PortDetector(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.fc, self.out = bug, P.Linear(6, 8), P.Linear(8, 5)

    def forward(self, x):
        logits = self.out(PF.sigmoid(self.fc(x)))
        scores = logits if self.bug == "threshold on the logits" else PF.sigmoid(logits)
        best = logits.argmin(-1) if self.bug == "the worst for the best" else logits.argmax(-1)
        return {"logits": logits, "found": scores > 0.5, "best": best}


# An activation kept as an attribute, and a table made at the first call.


class RefCoordinates(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x):
        n = x.shape[1]
        if n not in self.cache:
            self.cache[n] = torch.linspace(0, 1, n, dtype=x.dtype).view(1, n, 1)
        return torch.cat([x, self.cache[n].expand(len(x), -1, -1)], 2)


class RefCached(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coordinates, self.fc, self.out = RefCoordinates(), T.Linear(6, 8), T.Linear(8, 3)
        self.act, self.last = T.SiLU(), None

    def forward(self, x):
        self.last = self.act(self.fc(self.coordinates(x)))
        return self.out(self.last.mean(1)) * self.last.detach().std()


class PortCoordinates(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.cache = bug, {}

    def forward(self, x):
        n = x.shape[1]
        if n not in self.cache:
            steps = n + 1 if self.bug == "without the end" else n
            self.cache[n] = paddle.linspace(0, 1, steps, dtype=x.dtype)[:n].reshape([1, n, 1])
        return paddle.concat([x, self.cache[n].expand([x.shape[0], -1, -1])], axis=2)


class PortCached(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.coordinates, self.fc, self.out = PortCoordinates(bug), P.Linear(6, 8), P.Linear(8, 3)
        self.act, self.last = P.Silu(), None

    def forward(self, x):
        self.last = self.act(self.fc(self.coordinates(x)))
        return self.out(self.last.mean(1)) * self.last.detach().std(unbiased=self.bug != "biased deviation")


# A hook on a weight, which scales its gradient.


class RefHooked(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = T.Linear(6, 8), T.Linear(8, 3)
        self.fc1.weight.register_hook(lambda gradient: gradient * 0.1)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class PortHooked(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.fc1, self.fc2 = P.Linear(6, 8), P.Linear(8, 3)
        if bug != "no hook":
            self.fc1.weight.register_hook(lambda gradient: gradient * 0.1)

    def forward(self, x):
        return self.fc2(paddle.tanh(self.fc1(x)))


# A target without a gradient (BYOL), and a gradient through a rounding (VQ).


class RefTarget(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = T.Linear(6, 5), T.Linear(5, 5)

    def forward(self, a, b):
        online = TF.normalize(self.predictor(self.encoder(a)), dim=1)
        target = TF.normalize(self.encoder(b).detach(), dim=1)
        return 2 - 2 * (online * target).sum(1)


class PortTarget(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.encoder, self.predictor = bug, P.Linear(6, 5), P.Linear(5, 5)

    def forward(self, a, b):
        target = self.encoder(b)
        if self.bug != "target not detached":
            target = target.detach()
        online = PF.normalize(self.predictor(self.encoder(a)), axis=1)
        return 2 - 2 * (online * PF.normalize(target, axis=1)).sum(1)


class RefRounded(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = T.Linear(6, 4), T.Linear(4, 6)

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z + (torch.round(z) - z).detach())


class PortRounded(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.encoder, self.decoder = bug, P.Linear(6, 4), P.Linear(4, 6)

    def forward(self, x):
        z = self.encoder(x)
        rounded = paddle.round(z)
        return self.decoder(rounded if self.bug == "no straight-through gradient" else z + (rounded - z).detach())


# Siamese: one encoder, called for its two inputs in another order.


class RefSiamese(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = T.Sequential(T.Linear(6, 8), T.ReLU(), T.Linear(8, 5))
        self.head = T.Linear(5, 1)

    def forward(self, a, b):
        p, q = self.encoder(a), self.encoder(b)
        return self.head(torch.abs(p - q)).squeeze(-1)


class PortSiamese(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.head = bug, P.Linear(5, 1)
        self.encoder = P.Sequential(P.Linear(6, 8), P.ReLU(), P.Linear(8, 5))

    def forward(self, a, b):
        q, p = self.encoder(b), self.encoder(a)
        distance = (p - q) ** 2 if self.bug == "squares for absolutes" else paddle.abs(p - q)
        return self.head(distance).squeeze(-1)


# Heads by name.


class RefTasks(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = T.Linear(6, 8), T.LayerNorm(8)
        self.heads = T.ModuleDict({"age": T.Linear(8, 1), "kind": T.Linear(8, 3)})

    def forward(self, x):
        x = self.norm(TF.elu(self.trunk(x)))
        return {name: head(x) for name, head in self.heads.items()}


class PortTasks(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.trunk, self.norm = bug, P.Linear(6, 8), P.LayerNorm(8)
        self.heads = P.LayerDict({"kind": P.Linear(8, 3), "age": P.Linear(8, 1)})

    def forward(self, x):
        x = PF.elu(self.trunk(x), alpha=0.5 if self.bug == "another alpha" else 1.0)
        y = self.norm(x)
        source = {"kind": x if self.bug == "a head before the norm" else y, "age": y}
        return {name: head(source[name]) for name, head in self.heads.items()}


PAIRS = {
    "dataclass": Pair(RefDataclass, PortDataclass, [normal(3, 4, 5)], {"the last token": Bug("encoder")}),
    "loss": Pair(RefLoss, PortLoss, [normal(4, 6), np.array([0, 3, 2, 1])], {"a label not ignored": Bug("")}),
    "detector": Pair(
        RefDetector,
        PortDetector,
        [normal(4, 6)],
        {"threshold on the logits": Bug(""), "the worst for the best": Bug("")},
    ),
    "cache": Pair(
        RefCached,
        PortCached,
        [normal(3, 4, 5)],
        {"without the end": Bug("coordinates"), "biased deviation": Bug("")},
    ),
    "hook": Pair(RefHooked, PortHooked, [normal(4, 6)], {"no hook": Bug("fc1")}),
    "target": Pair(RefTarget, PortTarget, [normal(4, 6), normal(6, 6)[:4]], {"target not detached": Bug("")}),
    "rounding": Pair(RefRounded, PortRounded, [normal(4, 6)], {"no straight-through gradient": Bug("")}),
    "siamese": Pair(RefSiamese, PortSiamese, [normal(4, 6), normal(6, 6)[:4]], {"squares for absolutes": Bug("")}),
    "tasks": Pair(RefTasks, PortTasks, [normal(4, 6)], {"a head before the norm": Bug(""), "another alpha": Bug("")}),
}
