"""Transformers in both frameworks, of any size: the memory and the time that align takes of them.

  python -m maintenance.benchmarks.large_models decoder --layers 24 --width 1024
  python -m maintenance.benchmarks.large_models vit --layers 12 --width 768

Each is judged in this process, in both modes and precisions, with factories. Prints one line of JSON (see `measured`).
"""

import argparse
import json
import time
from functools import partial

import numpy as np
import paddle
import torch
import torchvision
from paddle import nn as P
from torch import nn as T

from maintenance.benchmarks.proof_speed import peak
from maintenance.benchmarks.speed import cpu_time

LENGTH = 32  # words of a decoder's input
PATCH = 16  # pixels
HEAD = 64  # width of an attention head


class RefBlock(T.Module):
    """Of a decoder: each place sees none that is `later`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = T.LayerNorm(width), T.Linear(width, 3 * width), T.Linear(width, width)
        self.norm2, self.fc1, self.act = T.LayerNorm(width), T.Linear(width, 4 * width), T.GELU()
        self.fc2 = T.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, c // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * HEAD**-0.5).masked_fill(later, -torch.inf).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class RefDecoder(T.Module):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.embed, self.places = T.Embedding(words, width), T.Parameter(torch.randn(length, width))
        self.blocks = T.ModuleList([RefBlock(width) for _ in range(layers)])
        self.norm, self.head = T.LayerNorm(width), T.Linear(width, words, bias=False)
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x, self.later)
        return self.head(self.norm(x))


class PortAttention(P.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = P.Linear(width, 3 * width), P.Linear(width, width)

    def forward(self, x: paddle.Tensor, later: paddle.Tensor | None) -> paddle.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape([b, n, 3, c // HEAD, HEAD]).transpose([2, 0, 3, 1, 4])
        weights = q @ k.transpose([0, 1, 3, 2]) * HEAD**-0.5
        if later is not None:
            weights = weights.masked_fill(later, -float("inf"))
        return self.proj((P.functional.softmax(weights) @ v).transpose([0, 2, 1, 3]).reshape([b, n, c]))


class PortBlock(P.Layer):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.norm1, self.attention = P.LayerNorm(width, epsilon), PortAttention(width)
        self.norm2, self.fc1 = P.LayerNorm(width, epsilon), P.Linear(width, 4 * width)
        self.act, self.fc2 = P.GELU(), P.Linear(4 * width, width)

    def forward(self, x: paddle.Tensor, later: paddle.Tensor | None = None) -> paddle.Tensor:
        x = x + self.attention(self.norm1(x), later)
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class PortDecoder(P.Layer):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.embed, self.places = P.Embedding(words, width), self.create_parameter([length, width])
        self.blocks = P.LayerList([PortBlock(width, 1e-5) for _ in range(layers)])
        self.norm, self.head = P.LayerNorm(width), P.Linear(width, words, bias_attr=False)
        self.register_buffer("later", paddle.ones([length, length], "int32").triu(1).astype("bool"))

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x, self.later)
        return self.head(self.norm(x))


class PortViT(P.Layer):
    """Of torchvision's VisionTransformer."""

    def __init__(self, layers: int, width: int, pixels: int, patch: int) -> None:
        super().__init__()
        self.token = self.create_parameter([1, 1, width])
        self.places = self.create_parameter([1, (pixels // patch) ** 2 + 1, width])
        self.patches = P.Conv2D(3, width, patch, patch)
        self.blocks = P.LayerList([PortBlock(width, 1e-6) for _ in range(layers)])
        self.norm, self.head = P.LayerNorm(width, 1e-6), P.Linear(width, 1000)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.patches(x).flatten(2).transpose([0, 2, 1])
        x = paddle.concat([self.token.expand([len(x), -1, -1]), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit(layers: int, width: int, pixels: int, patch: int) -> torchvision.models.VisionTransformer:
    """The reference of `PortViT`."""
    return torchvision.models.VisionTransformer(pixels, patch, layers, width // HEAD, width, 4 * width)


def saved(ref: T.Module, x: np.ndarray) -> int:
    """Bytes that torch would save in float64 of a forward pass of `ref` on `x` for the backward pass, weights aside."""
    sizes, own = {}, {tensor.untyped_storage().data_ptr() for tensor in (*ref.parameters(), *ref.buffers())}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes() * (2 if tensor.dtype == torch.float32 else 1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _output = ref(torch.from_numpy(x))  # lives while the sizes are noted: no memory is used twice
    return sum(sizes.values())


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Judge the model that `args` describe, in this process.

    -> the verdict's `status`; in GiB one side's `weights` and the `largest` tensor of them, in float32, what is
    `saved`, and the peak `memory` above that of the imports; `seconds` that passed, and `cpu` seconds.
    """
    import portproof
    import portproof.ladder.pairs.whole
    import portproof.localize.diagnosis  # what the first call would import
    from portproof.io import process

    if args.returning:
        process.BLOCK = process.KEPT = 2**18  # bytes
    before, rng = peak(), np.random.default_rng(0)
    if args.kind == "decoder":
        sizes = args.layers, args.width, args.words, LENGTH
        factories, names = (partial(RefDecoder, *sizes), partial(PortDecoder, *sizes)), None
        x = rng.integers(0, args.words, (1, LENGTH))
    else:
        sizes = args.layers, args.width, args.pixels, PATCH
        factories = partial(vit, *sizes), partial(PortViT, *sizes)
        own = {f"encoder.layers.encoder_layer_{i}.self_attention": f"blocks.{i}.attention.qkv" for i in range(sizes[0])}
        names = None if args.without_map else own
        x = rng.normal(size=(2, 3, args.pixels, args.pixels)).astype(np.float32)
    torch.manual_seed(0)
    paddle.seed(0)
    ref, port = (factory() for factory in factories)
    start, cpu = time.perf_counter(), cpu_time()
    verdict = portproof.align(ref, port, [x], names=names, factories=factories)
    seconds, cpu, memory = time.perf_counter() - start, cpu_time() - cpu, peak() - before
    sizes = [4 * parameter.numel() for parameter in ref.parameters()]
    found = {"weights": sum(sizes), "largest": max(sizes), "saved": saved(ref, x)}
    found = {name: size / 2**30 for name, size in found.items()} | {"memory": memory, "seconds": seconds, "cpu": cpu}
    return {"status": verdict.status, **found}


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("decoder", "vit"))
    for name, default in (("layers", 12), ("width", 768), ("words", 32000), ("pixels", 224)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--without-map", action="store_true", help="of vit: no map says which attention is which")
    parser.add_argument(
        "--returning", action="store_true", help="freed memory goes back at once: what is in use counts"
    )
    return parser


if __name__ == "__main__":
    print(json.dumps(measured(get_args_parser().parse_args())))
