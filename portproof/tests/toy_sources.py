"""Toy pairs as source code, one framework a text: for tests of commands, which import a user's files."""

REF = """
import torch


class Ref(torch.nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.first, self.act, self.last = torch.nn.Linear(5, width), torch.nn.ReLU(), torch.nn.Linear(width, classes)

    def forward(self, x):
        return self.last(self.act(self.first(x)))
"""
REF_SUM = """
class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 6), torch.nn.Linear(5, 6)

    def forward(self, x):
        return self.a(x) + self.b(x)
"""
PORT = """
import paddle


class Port(paddle.nn.Layer):
    def __init__(self, activation="ReLU"):
        super().__init__()
        self.one, self.act, self.two = paddle.nn.Linear(5, 6), getattr(paddle.nn, activation)(), paddle.nn.Linear(6, 3)

    def forward(self, x):
        return self.two(self.act(self.one(x)))
"""
PORT_SUM = """
class PortSum(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.u, self.v = paddle.nn.Linear(5, 6), paddle.nn.Linear(5, 6)

    def forward(self, x):
        return self.u(x) + self.v(x)
"""
