"""Models of sequences: recurrent layers, cells in a loop, convolutions in time."""

import numpy as np
import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF
from torch.nn.utils.rnn import pack_padded_sequence

from corpus.common import Bug, Pair, normal

T, P = torch.nn, paddle.nn


# Two layers both ways; the last states are joined.


class RefBiLSTM(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = T.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.fc = T.Linear(12, 3)

    def forward(self, x):
        _, (h, _) = self.rnn(x)
        return self.fc(torch.cat([h[-2], h[-1]], 1))


class PortBiLSTM(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.fc = bug, P.Linear(12, 3)
        self.rnn = P.LSTM(5, 6, num_layers=2, direction="bidirect", dropout=0.3)

    def forward(self, x):
        y, (h, _) = self.rnn(x)
        if self.bug == "the last output for the last states":
            return self.fc(y[:, -1])
        return self.fc(paddle.concat([h[-2], h[-1]], axis=1))


# A GRU that starts from a state made of a vector, as captioning models do.


class RefCaptioner(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.init, self.rnn, self.fc = T.Linear(4, 6), T.GRU(5, 6, batch_first=True), T.Linear(6, 3)

    def forward(self, x, image):
        return self.fc(self.rnn(x, torch.tanh(self.init(image)).unsqueeze(0))[0])


class PortCaptioner(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.init, self.rnn, self.fc = bug, P.Linear(4, 6), P.GRU(5, 6), P.Linear(6, 3)

    def forward(self, x, image):
        h = self.init(image)
        if self.bug != "tanh of the state missing":
            h = paddle.tanh(h)
        return self.fc(self.rnn(x, h.unsqueeze(0))[0])


# nn.GRUCell against one written by hand.


class RefGRULoop(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = T.GRUCell(5, 6), T.Linear(6, 3)

    def forward(self, x):
        h = torch.zeros(len(x), 6)
        outputs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outputs.append(self.fc(h))
        return torch.stack(outputs, 1)


class PortGRUCell(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.x2h, self.h2h = bug, P.Linear(5, 18), P.Linear(6, 18)

    def forward(self, x, h):
        (xr, xz, xn), (hr, hz, hn) = self.x2h(x).chunk(3, axis=1), self.h2h(h).chunk(3, axis=1)
        r, z = PF.sigmoid(xr + hr), PF.sigmoid(xz + hz)
        if self.bug == "gates exchanged":
            r, z = z, r
        n = paddle.tanh(xn + r * hn)
        return z * n + (1 - z) * h if self.bug == "update turned round" else (1 - z) * n + z * h


class PortGRULoop(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.cell, self.fc = PortGRUCell(bug), P.Linear(6, 3)

    def forward(self, x):
        h = paddle.zeros([x.shape[0], 6])
        outputs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outputs.append(self.fc(h))
        return paddle.stack(outputs, axis=1)


# LSTMCell in a loop; Paddle's returns (h, (h, c)).


class RefLSTMLoop(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre, self.cell, self.out = T.Linear(5, 5), T.LSTMCell(5, 6), T.Linear(6, 2)

    def forward(self, x):
        x = torch.relu(self.pre(x))
        h = c = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


class PortLSTMLoop(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.pre, self.cell, self.out = bug, P.Linear(5, 5), P.LSTMCell(5, 6), P.Linear(6, 2)

    def forward(self, x):
        x = PF.relu(self.pre(x))
        h = c = paddle.zeros([x.shape[0], 6], dtype=x.dtype)
        for t in range(x.shape[1]):
            _, (h, c) = self.cell(x[:, t], (h, c))
        return self.out(c if self.bug == "the cell for the state" else h)


# Written by hand, from a zero state.


class RefElman(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.h2h, self.h2o = T.Linear(5, 6), T.Linear(6, 6, bias=False), T.Linear(6, 3)

    def forward(self, x):
        h = torch.zeros(x.size(0), 6)
        for step in x.unbind(1):
            h = torch.tanh(self.i2h(step) + self.h2h(h))
        return self.h2o(h)


class PortElman(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.i2h, self.h2h, self.h2o = P.Linear(5, 6), P.Linear(6, 6, bias_attr=False), P.Linear(6, 3)

    def forward(self, x):
        h = paddle.zeros([x.shape[0], 6])
        for step in x.unbind(1):
            h = h.detach() if self.bug == "detached at every step" else h
            h = paddle.tanh(self.i2h(step) + self.h2h(h))
        return self.h2o(h)


# Packed sequences against sequence_length.


class RefPacked(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = T.LSTM(5, 6, batch_first=True), T.Linear(6, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.rnn(packed)[1][0][-1])


class PortPacked(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.rnn, self.fc = bug, P.LSTM(5, 6), P.Linear(6, 3)

    def forward(self, x, lengths):
        known = None if self.bug == "lengths not used" else lengths
        return self.fc(self.rnn(x, sequence_length=known)[1][0][-1])


# TCN: causal, dilated, with weight norm.


class RefTemporal(T.Module):
    def __init__(self, inputs: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = T.utils.parametrizations.weight_norm(T.Conv1d(inputs, 6, 3, padding=self.pad, dilation=dilation))
        self.down = T.Conv1d(inputs, 6, 1) if inputs != 6 else None

    def forward(self, x):
        y = TF.relu(self.conv(x)[..., : -self.pad])
        return TF.relu(y + (x if self.down is None else self.down(x)))


class RefTCN(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.fc = T.Sequential(RefTemporal(4, 1), RefTemporal(6, 2)), T.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.blocks(x)[:, :, -1])


class PortTemporal(P.Layer):
    def __init__(self, inputs: int, dilation: int, bug: str = "") -> None:
        super().__init__()
        self.bug, self.pad = bug, 2 * dilation
        self.conv = P.utils.weight_norm(P.Conv1D(inputs, 6, 3, padding=self.pad, dilation=dilation))
        self.down = P.Conv1D(inputs, 6, 1) if inputs != 6 else None

    def forward(self, x):
        y = self.conv(x)
        y = PF.relu(y[..., self.pad :] if self.bug == "not causal" else y[..., : -self.pad])
        return PF.relu(y + (x if self.down is None else self.down(x)))


class PortTCN(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.blocks, self.fc = P.Sequential(PortTemporal(4, 1), PortTemporal(6, 2, bug)), P.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.blocks(x)[:, :, -1])


STEPS = normal(3, 4, 5)
PAIRS = {
    "bilstm": Pair(RefBiLSTM, PortBiLSTM, [STEPS], {"the last output for the last states": Bug("")}),
    "captioner": Pair(RefCaptioner, PortCaptioner, [STEPS, normal(3, 4)], {"tanh of the state missing": Bug("")}),
    "gru by hand": Pair(
        RefGRULoop, PortGRULoop, [STEPS], {"gates exchanged": Bug("cell"), "update turned round": Bug("cell")}
    ),
    "lstm cell": Pair(RefLSTMLoop, PortLSTMLoop, [STEPS], {"the cell for the state": Bug("")}),
    "elman": Pair(RefElman, PortElman, [STEPS], {"detached at every step": Bug("")}),
    "packed": Pair(RefPacked, PortPacked, [STEPS, np.array([2, 4, 3])], {"lengths not used": Bug("")}),
    "tcn": Pair(RefTCN, PortTCN, [normal(3, 4, 9)], {"not causal": Bug("blocks.1")}),
}
