"""Transformers of images and sequences of vectors."""

import math

import numpy as np
import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF

from corpus.common import Bug, Pair, normal, padded

T, P = torch.nn, paddle.nn


# ViT: a class token, a position embedding, qkv in one layer; the port has q, k and v apart.


class RefAttention(T.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, T.Linear(dim, 3 * dim), T.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class RefBlock(T.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.attn = T.LayerNorm(dim, eps=1e-6), RefAttention(dim)
        self.norm2 = T.LayerNorm(dim, eps=1e-6)
        self.fc1, self.act, self.fc2 = T.Linear(dim, 24), T.GELU(), T.Linear(24, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class RefViT(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = T.Parameter(torch.zeros(1, 1, 16)), T.Parameter(0.5 * torch.randn(1, 5, 16))
        self.patch_embed = T.Conv2d(3, 16, 4, stride=4)
        self.blocks = T.Sequential(RefBlock(), RefBlock())
        self.norm, self.head = T.LayerNorm(16, eps=1e-6), T.Linear(16, 5)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class PortAttention(P.Layer):
    def __init__(self, dim: int = 16, heads: int = 2, bug: str = "") -> None:
        super().__init__()
        self.heads, self.bug = heads, bug
        self.q, self.k, self.v = P.Linear(dim, dim), P.Linear(dim, dim), P.Linear(dim, dim)
        self.proj = P.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (f(x).reshape([b, n, self.heads, -1]).transpose([0, 2, 1, 3]) for f in (self.q, self.k, self.v))
        head = c // self.heads
        attn = q @ k.transpose([0, 1, 3, 2]) / (head if self.bug == "scaled by d" else math.sqrt(head))
        out = PF.softmax(attn, axis=-1) @ v
        return self.proj(out.transpose([0, 2, 1, 3]).reshape([b, n, c]))


class PortBlock(P.Layer):
    def __init__(self, dim: int = 16, bug: str = "") -> None:
        super().__init__()
        self.norm1, self.attn = P.LayerNorm(dim, epsilon=1e-6), PortAttention(dim, bug=bug)
        self.norm2 = P.LayerNorm(dim, epsilon=1e-6)
        self.fc1, self.act, self.fc2 = P.Linear(dim, 24), P.GELU(), P.Linear(24, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class PortViT(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.cls_token = self.create_parameter([1, 1, 16], default_initializer=P.initializer.Constant(0.0))
        self.pos_embed = self.create_parameter([1, 5, 16], default_initializer=P.initializer.Normal(0.0, 0.5))
        self.pos_embed.stop_gradient = bug == "position frozen"
        self.patch_embed = P.Conv2D(3, 16, 4, stride=4)
        self.blocks = P.Sequential(PortBlock(bug=bug), PortBlock(bug=bug))
        self.norm = P.Identity() if bug == "no final norm" else P.LayerNorm(16, epsilon=1e-6)
        self.head = P.Linear(16, 5)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose([0, 2, 1])
        token = self.cls_token.expand([x.shape[0], -1, -1])
        if self.bug == "class token without position":
            x = paddle.concat([token, x + self.pos_embed[:, 1:]], axis=1)
        else:
            x = paddle.concat([token, x], axis=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


# Cross attention of the library, with padding: True leaves a key out in PyTorch, and keeps it in PaddlePaddle.


class RefCross(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = T.LayerNorm(16), T.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, memory, padding):
        return x + self.attn(self.norm(x), memory, memory, key_padding_mask=padding, need_weights=False)[0]


class RefReader(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.cross, self.head = T.Linear(6, 16), RefCross(), T.Linear(16, 3)

    def forward(self, x, memory, padding):
        return self.head(self.cross(self.inp(x), memory, padding))


class PortCross(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.norm, self.attn = bug, P.LayerNorm(16), P.MultiHeadAttention(16, 2)

    def forward(self, x, memory, padding):
        keep = padding if self.bug == "mask turned round" else paddle.logical_not(padding)
        return x + self.attn(self.norm(x), memory, memory, attn_mask=keep.unsqueeze([1, 2]))


class PortReader(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.inp, self.cross, self.head = P.Linear(6, 16), PortCross(bug), P.Linear(16, 3)

    def forward(self, x, memory, padding):
        return self.head(self.cross(self.inp(x), memory, padding))


# The library's encoder with key padding, and a mean over what is no padding.


class RefEncoder(T.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = T.TransformerEncoderLayer(16, 2, 24, activation="gelu", batch_first=True)
        self.inp, self.encoder = T.Linear(6, 16), T.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = T.Linear(16, 3)

    def forward(self, x, padding):
        y = self.encoder(self.inp(x), src_key_padding_mask=padding)
        keep = (~padding).to(y.dtype).unsqueeze(-1)
        return self.head((y * keep).sum(1) / keep.sum(1))


class PortEncoder(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        layer = P.TransformerEncoderLayer(16, 2, 24, activation="gelu", normalize_before=bug == "pre-norm")
        self.inp, self.encoder = P.Linear(6, 16), P.TransformerEncoder(layer, 2)
        self.head = P.Linear(16, 3)

    def forward(self, x, padding):
        mask = paddle.logical_not(padding)
        y = self.encoder(self.inp(x), src_mask=mask.unsqueeze([1, 2]))
        keep = mask.astype(y.dtype).unsqueeze(-1)
        return self.head((y * keep).sum(1) / keep.sum(1))


# The library's decoder with a causal mask.


class RefDecoder(T.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = T.TransformerDecoderLayer(16, 2, 24, batch_first=True, norm_first=True)
        self.inp, self.decoder = T.Linear(6, 16), T.TransformerDecoder(layer, 1, norm=T.LayerNorm(16))
        self.head = T.Linear(16, 3)

    def forward(self, x, memory):
        n = x.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
        return self.head(self.decoder(self.inp(x), memory, tgt_mask=mask))


class PortDecoder(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.ahead = 1 if bug == "sees one ahead" else 0
        layer = P.TransformerDecoderLayer(16, 2, 24, normalize_before=True)
        self.inp, self.decoder = P.Linear(6, 16), P.TransformerDecoder(layer, 1, norm=P.LayerNorm(16))
        self.head = P.Linear(16, 3)

    def forward(self, x, memory):
        n = x.shape[1]
        mask = paddle.tril(paddle.ones([n, n]), diagonal=self.ahead).astype("bool")
        return self.head(self.decoder(self.inp(x), memory, tgt_mask=mask))


# Swin: windows, a roll, a relative position bias whose index only the port saves.


def relative_index(window: int) -> np.ndarray:
    """(window**2, window**2), whole numbers: the row of the bias table for each pair of places."""
    places = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    offset = places[:, :, None] - places[:, None] + window - 1
    return offset[0] * (2 * window - 1) + offset[1]


class RefWindow(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = T.Parameter(torch.randn(9, 2))
        self.register_buffer("relative_position_index", torch.from_numpy(relative_index(2)), persistent=False)
        self.qkv, self.proj = T.Linear(8, 24), T.Linear(8, 8)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, 2).permute(2, 0, 1)
        out = TF.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(b, -1, -1, -1))
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


class RefSwinBlock(T.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.norm, self.attn = shift, T.LayerNorm(8), RefWindow()

    def forward(self, x):
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        y = self.attn(y).view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + torch.roll(y, (self.shift, self.shift), (1, 2))


class RefSwin(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = T.Linear(3, 8), T.Linear(8, 4)
        self.blocks = T.ModuleList([RefSwinBlock(0), RefSwinBlock(1)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PortWindow(P.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = self.create_parameter([9, 2])
        self.register_buffer("relative_position_index", paddle.to_tensor(relative_index(2)))
        self.qkv, self.proj = P.Linear(8, 24), P.Linear(8, 8)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape([b, n, 3, 2, 4]).transpose([2, 0, 3, 1, 4]).unbind(0)
        bias = paddle.index_select(self.relative_position_bias_table, self.relative_position_index.flatten())
        attn = q @ k.transpose([0, 1, 3, 2]) * 0.5 + bias.reshape([n, n, 2]).transpose([2, 0, 1]).unsqueeze(0)
        return self.proj((PF.softmax(attn) @ v).transpose([0, 2, 1, 3]).reshape([b, n, c]))


class PortSwinBlock(P.Layer):
    def __init__(self, shift: int, bug: str) -> None:
        super().__init__()
        self.shift, self.norm, self.attn = shift, P.LayerNorm(8), PortWindow()
        self.back = -shift if bug == "rolled on, not back" else shift

    def forward(self, x):
        b, h, w, c = x.shape
        y = paddle.roll(self.norm(x), [-self.shift, -self.shift], [1, 2])
        y = y.reshape([b, h // 2, 2, w // 2, 2, c]).transpose([0, 1, 3, 2, 4, 5]).reshape([-1, 4, c])
        y = self.attn(y).reshape([b, h // 2, w // 2, 2, 2, c]).transpose([0, 1, 3, 2, 4, 5]).reshape([b, h, w, c])
        return x + paddle.roll(y, [self.back, self.back], [1, 2])


class PortSwin(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.stem, self.head = P.Linear(3, 8), P.Linear(8, 4)
        self.blocks = P.LayerList([PortSwinBlock(0, bug), PortSwinBlock(1, bug)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# PVT: attention over a smaller image; the reference's blocks take (x, height, width), the port's (x, size).


class RefReduced(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.proj = T.Linear(8, 8), T.Linear(8, 16), T.Linear(8, 8)
        self.sr, self.norm = T.Conv2d(8, 8, 2, stride=2), T.LayerNorm(8)

    def forward(self, x, height, width):
        b, n, c = x.shape
        small = self.sr(x.transpose(1, 2).reshape(b, c, height, width)).flatten(2).transpose(1, 2)
        k, v = self.kv(self.norm(small)).chunk(2, -1)
        return self.proj((self.q(x) @ k.transpose(1, 2) * c**-0.5).softmax(-1) @ v)


class RefPVT(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attn = T.Conv2d(3, 8, 2, stride=2), T.LayerNorm(8), RefReduced()
        self.head = T.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        return self.head((x + self.attn(self.norm(x), height, width)).mean(1))


class PortReduced(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.q, self.kv, self.proj = P.Linear(8, 8), P.Linear(8, 16), P.Linear(8, 8)
        self.sr, self.norm = P.Conv2D(8, 8, 2, stride=2), P.LayerNorm(8)

    def forward(self, x, size):
        b, n, c = x.shape
        small = self.sr(x.transpose([0, 2, 1]).reshape([b, c, *size])).flatten(2).transpose([0, 2, 1])
        k, v = self.kv(self.norm(small)).chunk(2, axis=-1)
        if self.bug == "k and v exchanged":
            k, v = v, k
        return self.proj(PF.softmax(self.q(x) @ k.transpose([0, 2, 1]) * c**-0.5) @ v)


class PortPVT(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.embed, self.norm, self.attn = P.Conv2D(3, 8, 2, stride=2), P.LayerNorm(8), PortReduced(bug)
        self.head = P.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        size = x.shape[2:]
        x = x.flatten(2).transpose([0, 2, 1])
        return self.head((x + self.attn(self.norm(x), size)).mean(1))


# ALiBi: a bias by distance; its slopes are a buffer in the reference, and made in the port's forward.


class RefAlibi(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]), persistent=False)
        self.query_key_value, self.dense = T.Linear(8, 24), T.Linear(8, 8)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.query_key_value(x).view(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        place = torch.arange(n)
        bias = -self.slopes.view(2, 1, 1) * (place[:, None] - place[None]).abs()
        out = ((q @ k.transpose(-1, -2)) / 2 + bias).softmax(-1) @ v
        return self.dense(out.transpose(1, 2).reshape(b, n, c))


class RefBloom(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.attn, self.ln = T.Linear(5, 8), RefAlibi(), T.LayerNorm(8)

    def forward(self, x):
        x = self.inp(x)
        return self.ln(x + self.attn(x))


class PortAlibi(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.query_key_value, self.dense = bug, P.Linear(8, 24), P.Linear(8, 8)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.query_key_value(x).reshape([b, n, 3, 2, 4]).transpose([2, 0, 3, 1, 4]).unbind(0)
        if self.bug == "q and k exchanged":
            q, k = k, q
        place = paddle.arange(n)
        distance = (place.unsqueeze(1) - place.unsqueeze(0)).abs().astype(x.dtype)
        slopes = paddle.to_tensor([0.5, 0.25], dtype=x.dtype).reshape([2, 1, 1])
        bias = slopes * distance if self.bug == "wrong sign" else -slopes * distance
        out = PF.softmax(q @ k.transpose([0, 1, 3, 2]) / 2 + bias) @ v
        return self.dense(out.transpose([0, 2, 1, 3]).reshape([b, n, c]))


class PortBloom(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.inp, self.attn, self.ln = P.Linear(5, 8), PortAlibi(bug), P.LayerNorm(8)

    def forward(self, x):
        x = self.inp(x)
        return self.ln(x + self.attn(x))


PAIRS = {
    "vit": Pair(
        RefViT,
        PortViT,
        [normal(2, 3, 8, 8)],
        {
            "scaled by d": Bug("blocks.0.attn"),
            "class token without position": Bug(""),
            "position frozen": Bug(""),
            "no final norm": Bug("norm"),
        },
    ),
    "cross attention": Pair(
        RefReader,
        PortReader,
        [normal(3, 4, 6), normal(3, 5, 16), padded([5, 2, 3], 5)],
        {"mask turned round": Bug("cross")},
    ),
    "library encoder": Pair(
        RefEncoder, PortEncoder, [normal(3, 5, 6), padded([5, 2, 3], 5)], {"pre-norm": Bug("encoder.layers.0")}
    ),
    "library decoder": Pair(RefDecoder, PortDecoder, [normal(2, 5, 6), normal(2, 4, 16)], {"sees one ahead": Bug("")}),
    "swin": Pair(RefSwin, PortSwin, [normal(2, 4, 4, 3)], {"rolled on, not back": Bug("blocks.1")}),
    "pvt": Pair(RefPVT, PortPVT, [normal(2, 3, 8, 8)], {"k and v exchanged": Bug("attn")}),
    "alibi": Pair(
        RefBloom, PortBloom, [normal(2, 5, 5)], {"wrong sign": Bug("attn"), "q and k exchanged": Bug("attn")}
    ),
}
