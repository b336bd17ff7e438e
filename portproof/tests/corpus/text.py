"""Models of tokens: whole numbers in, tied weights, masks, keyword arguments."""

import math

import numpy as np
import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF

from corpus.common import Bug, Pair, ids

T, P = torch.nn, paddle.nn


# BERT: called with keywords, which the port's own layers name otherwise; q, k and v in one layer there.


class RefBertLayer(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = T.Linear(16, 16), T.Linear(16, 16), T.Linear(16, 16)
        self.dense, self.norm1 = T.Linear(16, 16), T.LayerNorm(16, eps=1e-12)
        self.up, self.act, self.down, self.norm2 = T.Linear(16, 24), T.GELU(), T.Linear(24, 16), T.LayerNorm(16, 1e-12)

    def forward(self, hidden_states, attention_mask=None):
        b, n, _ = hidden_states.shape
        q, k, v = (f(hidden_states).view(b, n, 2, 8).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(8) + attention_mask
        context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, 16)
        x = self.norm1(self.dense(context) + hidden_states)
        return self.norm2(self.down(self.act(self.up(x))) + x)


class RefEmbeddings(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.types, self.positions = T.Embedding(30, 16), T.Embedding(2, 16), T.Embedding(10, 16)
        self.norm = T.LayerNorm(16, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(10).expand(1, -1), persistent=False)

    def forward(self, input_ids, token_type_ids):
        positions = self.position_ids[:, : input_ids.shape[1]]
        return self.norm(self.words(input_ids) + self.positions(positions) + self.types(token_type_ids))


class RefBert(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.layers = RefEmbeddings(), T.ModuleList([RefBertLayer(), RefBertLayer()])
        self.pooler = T.Linear(16, 16)

    def forward(self, input_ids=None, token_type_ids=None, attention_mask=None):
        x = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        mask = (1.0 - attention_mask[:, None, None].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(hidden_states=x, attention_mask=mask)
        return {"last_hidden_state": x, "pooler_output": torch.tanh(self.pooler(x[:, 0]))}


class PortBertLayer(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.qkv, self.dense, self.norm1 = P.Linear(16, 48), P.Linear(16, 16), P.LayerNorm(16, epsilon=1e-12)
        self.up, self.act = P.Linear(16, 24), P.GELU(approximate=bug == "GELU by tanh")
        self.down, self.norm2 = P.Linear(24, 16), P.LayerNorm(16, epsilon=1e-12)

    def forward(self, x, mask):
        b, n, _ = x.shape
        q, k, v = (t.reshape([b, n, 2, 8]).transpose([0, 2, 1, 3]) for t in self.qkv(x).chunk(3, axis=-1))
        scores = paddle.matmul(q, k, transpose_y=True) / math.sqrt(8) + mask
        context = (PF.softmax(scores) @ v).transpose([0, 2, 1, 3]).reshape([b, n, 16])
        x = self.norm1(self.dense(context) + x)
        return self.norm2(self.down(self.act(self.up(x))) + x)


class PortEmbeddings(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.words, self.types, self.positions = P.Embedding(30, 16), P.Embedding(2, 16), P.Embedding(10, 16)
        self.norm = P.LayerNorm(16) if bug == "default epsilon" else P.LayerNorm(16, epsilon=1e-12)

    def forward(self, ids, types):
        positions = paddle.arange(ids.shape[1]).unsqueeze(0)
        return self.norm(self.words(ids) + self.positions(positions) + self.types(types))


class PortBert(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.embeddings, self.pooler = bug, PortEmbeddings(bug), P.Linear(16, 16)
        self.layers = P.LayerList([PortBertLayer(bug), PortBertLayer("")])

    def forward(self, input_ids=None, token_type_ids=None, attention_mask=None):
        x = self.embeddings(input_ids, token_type_ids)
        keep = attention_mask.unsqueeze([1, 2]).astype(x.dtype)
        mask = keep * -10000.0 if self.bug == "mask not turned round" else (1.0 - keep) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return {"last_hidden_state": x, "pooler_output": PF.tanh(self.pooler(x[:, 0]))}


# GPT: a weight stored as in x out, a causal mask that is a buffer, the output tied to the embedding.


class RefConv1D(T.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = T.Parameter(0.3 * torch.randn(inputs, outputs)), T.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class RefCausal(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = RefConv1D(16, 48), RefConv1D(16, 16)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)).view(1, 1, 8, 8))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, 2, 8).transpose(1, 2) for t in self.c_attn(x).split(16, dim=2))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(8)
        scores = scores.masked_fill(~self.mask[:, :, :n, :n], torch.finfo(scores.dtype).min)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class RefGPTBlock(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = T.LayerNorm(16), RefCausal(), T.LayerNorm(16)
        self.c_fc, self.c_proj = RefConv1D(16, 32), RefConv1D(32, 16)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        y = self.c_fc(self.ln_2(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3)))
        return x + self.c_proj(y)


class RefGPT(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = T.Embedding(20, 16), T.Embedding(8, 16), T.ModuleList([RefGPTBlock()])
        self.ln_f, self.lm_head = T.LayerNorm(16), T.Linear(16, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class PortCausal(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.axis = -2 if bug == "softmax over the queries" else -1
        self.c_attn, self.c_proj = P.Linear(16, 48), P.Linear(16, 16)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.reshape([b, n, 2, 8]).transpose([0, 2, 1, 3]) for t in self.c_attn(x).split(3, axis=2))
        scores = paddle.matmul(q, k, transpose_y=True) / math.sqrt(8)
        scores = paddle.where(paddle.tril(paddle.ones([n, n])) > 0, scores, paddle.full_like(scores, -1e30))
        out = PF.softmax(scores, axis=self.axis) @ v
        return self.c_proj(out.transpose([0, 2, 1, 3]).reshape([b, n, c]))


class PortGPTBlock(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.ln_1, self.attn, self.ln_2 = bug, P.LayerNorm(16), PortCausal(bug), P.LayerNorm(16)
        self.c_fc, self.c_proj = P.Linear(16, 32), P.Linear(32, 16)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(PF.gelu(self.c_fc(self.ln_2(x)), approximate=self.bug != "GELU by erf"))


class PortGPT(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.wte, self.wpe, self.h = P.Embedding(20, 16), P.Embedding(8, 16), P.LayerList([PortGPTBlock(bug)])
        self.ln_f = P.LayerNorm(16)
        self.lm_head = P.Linear(16, 20, bias_attr=False) if bug == "not tied" else None

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(paddle.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return self.lm_head(x) if self.lm_head else paddle.matmul(x, self.wte.weight, transpose_y=True)


# Llama: RMSNorm in float32 on purpose, rotary embedding, SwiGLU whose two projections are one layer in the port.


class RefRMSNorm(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = T.Parameter(torch.ones(16)), 1e-5

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class RefRotary(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = T.Linear(16, 16, bias=False), T.Linear(16, 16, bias=False)
        self.v_proj, self.o_proj = T.Linear(16, 16, bias=False), T.Linear(16, 16, bias=False)
        angles = torch.outer(torch.arange(8.0), 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def rotated(self, x):
        n, half = x.shape[2], x.shape[3] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[:n].to(x.dtype) + turned * self.sin[:n].to(x.dtype)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, 2, 8).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out = TF.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, c))


class RefLlamaLayer(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attn, self.post_norm = RefRMSNorm(), RefRotary(), RefRMSNorm()
        self.gate_proj, self.up_proj = T.Linear(16, 24, bias=False), T.Linear(16, 24, bias=False)
        self.down_proj = T.Linear(24, 16, bias=False)

    def forward(self, x):
        x = x + self.attn(self.input_norm(x))
        y = self.post_norm(x)
        return x + self.down_proj(TF.silu(self.gate_proj(y)) * self.up_proj(y))


class RefLlama(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = T.Embedding(20, 16), T.ModuleList([RefLlamaLayer()]), RefRMSNorm()
        self.lm_head = T.Linear(16, 20, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class PortRMSNorm(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.weight = self.create_parameter([16], default_initializer=P.initializer.Constant(1.0))
        self.eps = 1e-3 if bug == "epsilon of the RMS norm" else 1e-5

    def forward(self, x):
        y = x.astype("float32")
        y = y * paddle.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.astype(x.dtype)


class PortRotary(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.q_proj, self.k_proj = P.Linear(16, 16, bias_attr=False), P.Linear(16, 16, bias_attr=False)
        self.v_proj, self.o_proj = P.Linear(16, 16, bias_attr=False), P.Linear(16, 16, bias_attr=False)
        steps = paddle.arange(0, 8, 2, dtype="float32") / 8
        angles = paddle.outer(paddle.arange(8, dtype="float32"), 1.0 / 100.0**steps)
        self.cos, self.sin = (f(paddle.concat([angles, angles], -1)) for f in (paddle.cos, paddle.sin))

    def rotated(self, x):
        n, half = x.shape[2], x.shape[3] // 2
        if self.bug == "rotary pairs interleaved":
            turned = paddle.stack([-x[..., 1::2], x[..., ::2]], axis=-1).flatten(-2)
        else:
            turned = paddle.concat([-x[..., half:], x[..., :half]], axis=-1)
        return x * self.cos[:n].astype(x.dtype) + turned * self.sin[:n].astype(x.dtype)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (f(x).reshape([b, n, 2, 8]).transpose([0, 2, 1, 3]) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = paddle.matmul(self.rotated(q), self.rotated(k), transpose_y=True) / math.sqrt(8)
        scores = scores + paddle.triu(paddle.full([n, n], -1e9, dtype=x.dtype), diagonal=1)
        return self.o_proj((PF.softmax(scores) @ v).transpose([0, 2, 1, 3]).reshape([b, n, c]))


class PortLlamaLayer(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.input_norm, self.attn, self.post_norm = PortRMSNorm(), PortRotary(bug), PortRMSNorm(bug)
        self.gate_up_proj, self.down_proj = P.Linear(16, 48, bias_attr=False), P.Linear(24, 16, bias_attr=False)

    def forward(self, x):
        x = x + self.attn(self.input_norm(x))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, axis=-1)
        act = PF.sigmoid if self.bug == "GLU for SwiGLU" else PF.silu
        return x + self.down_proj(act(gate) * up)


class PortLlama(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.embed, self.layers, self.norm = P.Embedding(20, 16), P.LayerList([PortLlamaLayer(bug)]), PortRMSNorm()
        self.lm_head = P.Linear(16, 20, bias_attr=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


# A sinusoidal table that both sides make in float32 when they are constructed.


class RefPositions(T.Module):
    def __init__(self) -> None:
        super().__init__()
        place, table = torch.arange(32.0).unsqueeze(1), torch.zeros(32, 8)
        rates = torch.exp(torch.arange(0, 8, 2).float() * (-math.log(10000.0) / 8))
        table[:, 0::2], table[:, 1::2] = torch.sin(place * rates), torch.cos(place * rates)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class RefSinusoid(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = T.Embedding(20, 8), RefPositions()
        self.fc1, self.fc2 = T.Linear(8, 8), T.Linear(8, 3)

    def forward(self, ids):
        x = self.positions(self.embed(ids) * math.sqrt(8))
        return self.fc2(torch.tanh(self.fc1(x)).mean(1))


class PortPositions(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        place = paddle.arange(32, dtype="float32").unsqueeze(1)
        rates = paddle.exp(paddle.arange(0, 8, 2, dtype="float32") * (-math.log(10000.0) / 8))
        waves = paddle.sin(place * rates), paddle.cos(place * rates)
        halves = bug == "sines before cosines"
        table = paddle.concat(waves, 1) if halves else paddle.stack(waves, -1).flatten(-2)
        self.register_buffer("table", table, persistable=False)

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class PortSinusoid(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.scale = 1.0 if bug == "embedding not scaled" else math.sqrt(8)
        self.embed, self.positions = P.Embedding(20, 8), PortPositions(bug)
        self.fc1, self.fc2 = P.Linear(8, 8), P.Linear(8, 3)

    def forward(self, ids):
        x = self.positions(self.embed(ids) * self.scale)
        return self.fc2(paddle.tanh(self.fc1(x)).mean(1))


# A mean over what is no padding.


class RefBag(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = T.Embedding(20, 8), T.Linear(8, 3)

    def forward(self, ids):
        keep = (ids != 0).unsqueeze(-1).to(self.fc.weight.dtype)
        return self.fc((self.embed(ids) * keep).sum(1) / keep.sum(1).clamp(min=1))


class PortBag(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.embed, self.fc = bug, P.Embedding(20, 8), P.Linear(8, 3)

    def forward(self, ids):
        keep = (ids != 0).unsqueeze(-1).astype("float32")
        count = ids.shape[1] if self.bug == "padding counts" else keep.sum(1).clip(min=1)
        return self.fc((self.embed(ids) * keep).sum(1) / count)


# TextCNN: kernels of several widths, the maximum over time, a padding index that gets no gradient.


class RefTextCNN(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = T.Embedding(20, 8, padding_idx=0)
        self.convs = T.ModuleList([T.Conv1d(8, 4, k) for k in (2, 3, 4)])
        self.dropout, self.fc = T.Dropout(0.5), T.Linear(12, 3)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.fc(self.dropout(torch.cat([TF.relu(conv(x)).amax(2) for conv in self.convs], 1)))


class PortTextCNN(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.embed = P.Embedding(20, 8) if bug == "no padding index" else P.Embedding(20, 8, padding_idx=0)
        self.convs = P.LayerList([P.Conv1D(8, 4, k) for k in (2, 3, 4)])
        mode = "downscale_in_infer" if bug == "dropout that scales in eval" else "upscale_in_train"
        self.dropout, self.fc = P.Dropout(0.5, mode=mode), P.Linear(12, 3)

    def forward(self, ids):
        x = self.embed(ids).transpose([0, 2, 1])
        return self.fc(self.dropout(paddle.concat([PF.relu(conv(x)).max(axis=2) for conv in self.convs], axis=1)))


# Tokens as one-hot vectors, float32 by Paddle's function.


class RefOneHot(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = T.Linear(12, 8), T.Linear(8, 3)

    def forward(self, ids):
        x = TF.one_hot(ids, 12).to(self.inp.weight.dtype)
        return self.out(torch.sigmoid(self.inp(x)).sum(1))


class PortOneHot(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.inp, self.out = bug, P.Linear(12, 8), P.Linear(8, 3)

    def forward(self, ids):
        x = PF.one_hot(ids, 12)
        y = self.inp(x)
        return self.out((PF.relu(y) if self.bug == "ReLU for sigmoid" else PF.sigmoid(y)).sum(axis=1).astype("float32"))


TOKENS = ids(20, 3, 6)
BERT = {
    "input_ids": ids(30, 2, 6),
    "token_type_ids": np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]]),
    "attention_mask": np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
}
PAIRS = {
    "bert": Pair(
        RefBert,
        PortBert,
        BERT,
        {
            "default epsilon": Bug("embeddings.norm", "epsilon"),
            "GELU by tanh": Bug("layers.0.act", "GELU"),
            "mask not turned round": Bug(""),
        },
    ),
    "gpt": Pair(
        RefGPT,
        PortGPT,
        [TOKENS],
        {
            "softmax over the queries": Bug("h.0.attn"),
            "not tied": Bug("lm_head", also=("wte", "")),
            "GELU by erf": Bug("h.0"),
        },
    ),
    "llama": Pair(
        RefLlama,
        PortLlama,
        [TOKENS],
        {
            "rotary pairs interleaved": Bug("layers.0.attn"),
            "epsilon of the RMS norm": Bug("layers.0.post_norm"),
            "GLU for SwiGLU": Bug("layers.0"),
        },
    ),
    "sinusoid": Pair(
        RefSinusoid,
        PortSinusoid,
        [TOKENS],
        {"sines before cosines": Bug("positions"), "embedding not scaled": Bug("")},
    ),
    "bag": Pair(RefBag, PortBag, [TOKENS * (TOKENS > 5)], {"padding counts": Bug("")}),
    "textcnn": Pair(
        RefTextCNN,
        PortTextCNN,
        [TOKENS],
        {"no padding index": Bug("embed"), "dropout that scales in eval": Bug("dropout")},
    ),
    "onehot": Pair(RefOneHot, PortOneHot, [ids(12, 3, 5)], {"ReLU for sigmoid": Bug("")}),
}
