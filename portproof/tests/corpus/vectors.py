"""Mixers, experts, graphs, spectra, and norms written by hand."""

import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF

from corpus.common import Bug, Pair, normal

T, P = torch.nn, paddle.nn


# MLP-Mixer; all names are others there, and what is called first is defined last.


class RefMixerBlock(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = T.LayerNorm(8), T.LayerNorm(8)
        self.mlp_tokens = T.Sequential(T.Linear(4, 6), T.GELU(), T.Dropout(0.1), T.Linear(6, 4))
        self.mlp_channels = T.Sequential(T.Linear(8, 12), T.GELU(), T.Dropout(0.1), T.Linear(12, 8))

    def forward(self, x):
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class RefMixer(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = T.Linear(5, 8), T.Sequential(RefMixerBlock(), RefMixerBlock())
        self.norm, self.head = T.LayerNorm(8), T.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


class PortFeedForward(P.Layer):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.last, self.first = P.Linear(hidden, width), P.Linear(width, hidden)

    def forward(self, x):
        return self.last(PF.dropout(PF.gelu(self.first(x)), 0.1, training=self.training))


class PortMixerLayer(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.channel_ffn, self.token_ffn = PortFeedForward(8, 12), PortFeedForward(4, 6)
        self.ln_channel, self.ln_token = P.LayerNorm(8), P.LayerNorm(8)

    def forward(self, x):
        x = x + self.token_ffn(self.ln_token(x).transpose([0, 2, 1])).transpose([0, 2, 1])
        if self.bug == "post-norm":
            return self.ln_channel(x + self.channel_ffn(x))
        return x + self.channel_ffn(self.ln_channel(x))


class PortMixer(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.classifier, self.final_ln = P.Linear(8, 3), P.LayerNorm(8)
        self.layers, self.embed = P.LayerList([PortMixerLayer(), PortMixerLayer(bug)]), P.Linear(5, 8)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.final_ln(x).mean(axis=1))


# Experts: each token goes through the best one.


class RefExperts(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = T.Linear(6, 3), T.ModuleList([T.Linear(6, 6) for _ in range(3)])

    def forward(self, x):
        weight, best = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(best == i)[0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return y


class RefMoE(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.moe, self.head = T.Linear(5, 6), RefExperts(), T.Linear(6, 2)

    def forward(self, x):
        x = self.inp(x)
        return self.head(x + self.moe(x))


class PortExperts(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.gate, self.experts = P.Linear(6, 3), P.LayerList([P.Linear(6, 6) for _ in range(3)])

    def forward(self, x):
        scores = PF.softmax(self.gate(x), axis=0 if self.bug == "softmax over the tokens" else -1)
        best = scores.argmax(-1)
        weight = scores.max(-1)
        y = paddle.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = paddle.nonzero(best == i).flatten()
            if len(rows):
                out = expert(paddle.gather(x, rows)) * paddle.gather(weight, rows).unsqueeze(-1)
                y = paddle.index_add(y, rows, 0, out)
        return y


class PortMoE(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.inp, self.moe, self.head = P.Linear(5, 6), PortExperts(bug), P.Linear(6, 2)

    def forward(self, x):
        x = self.inp(x)
        return self.head(x + self.moe(x))


# A graph convolution over an adjacency.


class RefGraphConv(T.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.bias = T.Linear(inputs, outputs, bias=False), T.Parameter(torch.zeros(outputs))

    def forward(self, x, adjacency):
        a = adjacency + torch.eye(adjacency.shape[-1], dtype=adjacency.dtype)
        d = a.sum(-1).rsqrt()
        return (d[..., :, None] * a * d[..., None, :]) @ self.linear(x) + self.bias


class RefGCN(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = RefGraphConv(4, 6), RefGraphConv(6, 3)

    def forward(self, x, adjacency):
        return TF.log_softmax(self.conv2(TF.elu(self.conv1(x, adjacency)), adjacency), dim=-1)


class PortGraphConv(P.Layer):
    def __init__(self, inputs: int, outputs: int, bug: str = "") -> None:
        super().__init__()
        self.bug, self.linear = bug, P.Linear(inputs, outputs, bias_attr=False)
        self.bias = self.create_parameter([outputs], is_bias=True)

    def forward(self, x, adjacency):
        a = adjacency + paddle.eye(adjacency.shape[-1], dtype=adjacency.dtype)
        degree = a.sum(-1)
        if self.bug == "normalized by rows":
            return paddle.matmul(a / degree.unsqueeze(-1), self.linear(x)) + self.bias
        d = paddle.rsqrt(degree)
        return paddle.matmul(d.unsqueeze(-1) * a * d.unsqueeze(-2), self.linear(x)) + self.bias


class PortGCN(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.axis = 1 if bug == "log-softmax over the nodes" else -1
        self.conv1, self.conv2 = PortGraphConv(4, 6, bug), PortGraphConv(6, 3)

    def forward(self, x, adjacency):
        return PF.log_softmax(self.conv2(PF.elu(self.conv1(x, adjacency)), adjacency), axis=self.axis)


# A filter of frequencies: complex numbers inside.


class RefFilter(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.complex_weight = T.Parameter(torch.randn(4, 3, 6, 2))

    def forward(self, x):
        weight = torch.view_as_complex(self.complex_weight)
        return torch.fft.irfft2(torch.fft.rfft2(x, dim=(1, 2)) * weight, s=x.shape[1:3], dim=(1, 2))


class RefSpectral(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.filter, self.out = T.Linear(3, 6), RefFilter(), T.Linear(6, 2)

    def forward(self, x):
        return self.out(self.filter(torch.tanh(self.inp(x))).mean((1, 2)) + x.mean())


class PortFilter(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.norm = "ortho" if bug == "another norm of the inverse" else "backward"
        self.complex_weight = self.create_parameter([4, 3, 6, 2], default_initializer=P.initializer.Normal())

    def forward(self, x):
        spectrum = paddle.fft.rfft2(x, axes=(1, 2)) * paddle.as_complex(self.complex_weight)
        return paddle.fft.irfft2(spectrum, s=x.shape[1:3], axes=(1, 2), norm=self.norm)


class PortSpectral(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.inp, self.filter, self.out = P.Linear(3, 6), PortFilter(bug), P.Linear(6, 2)

    def forward(self, x):
        return self.out(self.filter(paddle.tanh(self.inp(x))).mean([1, 2]) + x.mean())


# A norm written by hand: the unbiased deviation, and epsilon added to it.


class RefNorm(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_2, self.b_2, self.eps = T.Parameter(torch.ones(6)), T.Parameter(torch.zeros(6)), 1e-2

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class RefHandNorm(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = T.Linear(5, 6), RefNorm(), T.Linear(6, 2)

    def forward(self, x):
        return self.out(self.norm(torch.sigmoid(self.fc(x))))


class PortNorm(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.eps = bug, 1e-2
        self.a_2 = self.create_parameter([6], default_initializer=P.initializer.Constant(1.0))
        self.b_2 = self.create_parameter([6], default_initializer=P.initializer.Constant(0.0))

    def forward(self, x):
        variance = x.var(-1, keepdim=True, unbiased=self.bug != "the biased deviation")
        if self.bug == "epsilon under the root":
            deviation = paddle.sqrt(variance + self.eps)
        else:
            deviation = paddle.sqrt(variance) + self.eps
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / deviation + self.b_2


class PortHandNorm(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.fc, self.norm, self.out = P.Linear(5, 6), PortNorm(bug), P.Linear(6, 2)

    def forward(self, x):
        return self.out(self.norm(PF.sigmoid(self.fc(x))))


# A head of three layers, in which the port has one more.


class RefHeaded(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = T.Sequential(T.Linear(6, 8), T.Hardtanh(), T.Linear(8, 8))
        self.head = T.Sequential(T.Linear(8, 5), T.Softplus(), T.Linear(5, 2))

    def forward(self, x):
        return self.head(self.body(x))


class PortHeaded(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.body = P.Sequential(P.Linear(6, 8), P.Hardtanh(), P.Linear(8, 8))
        activation = P.Softplus(beta=2.0) if bug == "another beta" else P.Softplus()
        more = [P.Linear(2, 2)] if bug == "a layer too many" else []
        self.head = P.Sequential(P.Linear(8, 5), activation, P.Linear(5, 2), *more)

    def forward(self, x):
        return self.head(self.body(x))


ADJACENCY = (abs(normal(2, 4, 4)) > 0.6).astype("float32")
PAIRS = {
    "mixer": Pair(RefMixer, PortMixer, [normal(2, 4, 5)], {"post-norm": Bug("blocks.1")}),
    "experts": Pair(RefMoE, PortMoE, [normal(8, 5)], {"softmax over the tokens": Bug("moe")}),
    "graph": Pair(
        RefGCN,
        PortGCN,
        {"x": normal(2, 4, 4), "adjacency": ADJACENCY + ADJACENCY.transpose(0, 2, 1)},
        {"normalized by rows": Bug("conv1"), "log-softmax over the nodes": Bug("")},
    ),
    "spectral": Pair(RefSpectral, PortSpectral, [normal(2, 4, 4, 3)], {"another norm of the inverse": Bug("filter")}),
    "norm by hand": Pair(
        RefHandNorm,
        PortHandNorm,
        [normal(4, 5)],
        {"the biased deviation": Bug("norm"), "epsilon under the root": Bug("norm")},
    ),
    "headed": Pair(
        RefHeaded,
        PortHeaded,
        [normal(4, 6)],
        {"a layer too many": Bug("head"), "another beta": Bug("head.1")},
    ),
}
