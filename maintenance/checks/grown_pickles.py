"""Pickles grown by a grammar: sound in form, and made to cost the reader time and memory.

A grown pickle nests values, shares parts so often that without sharing they would be endless, calls what readers know
with arguments of any kind, calls it thousands of times with the same long argument, and claims sizes that no memory
holds.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

MOST_BYTES = 2**20
CALLABLES = (
    "_codecs encode",
    "builtins bytes",
    "builtins tuple",
    "collections Counter",
    "collections OrderedDict",
    "numpy dtype",
    "numpy ndarray",
    "numpy.core.multiarray _reconstruct",
    "numpy.core.multiarray scalar",
    "numpy.core.numeric _frombuffer",
    "torch Size",
    "torch device",
    "torch float32",
    "torch FloatStorage",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "builtins list",  # which nobody may call
)


class Grower:
    """One pickle; every method puts one value on the stack of the machine that reads it."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.parts: list[bytes] = []
        self.length = 0
        self.kept = 0  # values in the memo

    def put(self, *parts: bytes) -> None:
        self.parts += parts
        self.length += sum(map(len, parts))

    def text(self) -> None:
        letters = self.draws.choice((b"a", b"float32", b"<f4", b"storage", b"0", b"x" * self.draws.randrange(60_000)))
        self.put(b"X", len(letters).to_bytes(4, "little"), letters)

    def bytes(self) -> None:
        content = bytes(self.draws.choice((0, 4, 16, 60_000)))
        self.put(b"B", len(content).to_bytes(4, "little"), content)

    def number(self) -> None:
        size = self.draws.choice((1, 1, 1, 4, 8, 255))
        self.put(b"\x8a", bytes([size]), self.draws.randbytes(size))

    def plain(self) -> None:
        self.put(self.draws.choice((b"N", b"\x88", b"\x89", b"K\x00", b"K\x01", b"G" + struct.pack(">d", 0.5))))

    def known(self) -> None:
        self.put(b"c", self.draws.choice(CALLABLES).replace(" ", "\n").encode(), b"\n")

    def shared(self) -> None:
        if self.kept:
            self.get(self.draws.randrange(self.kept))
        else:
            self.plain()

    def get(self, number: int) -> None:
        self.put(b"j", number.to_bytes(4, "little"))

    def keep(self) -> int:
        """Number the value on the stack."""
        self.put(b"r", self.kept.to_bytes(4, "little"))
        self.kept += 1
        return self.kept - 1

    def sequence(self, depth: int) -> None:
        self.put(b"(")
        for _ in range(self.draws.randrange(6)):
            self.value(depth - 1)
        self.put(self.draws.choice((b"t", b"l")))

    def names(self, depth: int) -> None:
        self.put(b"}", b"(")
        for _ in range(self.draws.randrange(4)):
            self.value(depth - 1) if self.draws.random() < 0.5 else self.text()
            self.value(depth - 1)
        self.put(b"u")

    def doubled(self, depth: int) -> None:
        """A value in which another stands 2^n times, or that many levels deep."""
        self.value(depth - 1)
        levels = self.draws.choice((3, 20, 60, 2000))
        twice = self.draws.choice((b"\x86", b"tuple", b"dict"))
        for _ in range(levels):
            number = self.keep()
            if twice == b"dict":  # as a name and as a value
                self.put(b"0", b"}")
                self.get(number)
                self.get(number)
                self.put(b"s")
            elif twice == b"tuple":
                self.put(b"\x85")
            else:
                self.get(number)
                self.put(b"\x86")

    def called(self, depth: int) -> None:
        self.known()
        self.put(b"(")
        for _ in range(self.draws.choice((0, 1, 1, 2, 4, 6))):
            self.value(depth - 1)
        self.put(b"t", b"R")
        if self.draws.random() < 0.3:
            self.value(depth - 1)
            self.put(b"b")

    def called_often(self, depth: int) -> None:
        """A list of the same call thousands of times, with one long argument."""
        self.known()
        function = self.keep()
        count = self.draws.choice((100, 10_000))
        self.put(b"(", b"(" if self.draws.random() < 0.5 else b"")
        self.put(self.draws.choice((b"K\x01", b"X\x01\x00\x00\x00a", b"(K\x01K\x02t", b"]")) * count)
        self.put(self.draws.choice((b"t", b"l")))
        if self.draws.random() < 0.5:
            self.put(b"\x85")
        argument = self.keep()
        self.put(b"0", b"0", b"]", b"(")
        for _ in range(self.draws.choice((10, 3000))):
            self.get(function)
            self.get(argument)
            self.put(b"R")
        self.put(b"e")

    def tensor(self, depth: int) -> None:
        """Nearly one of torch.save."""
        self.put(b"ctorch._utils\n_rebuild_tensor_v2\n", b"((", b"X\x07\x00\x00\x00storage", b"ctorch\nFloatStorage\n")
        self.text() if self.draws.random() < 0.7 else self.value(depth - 1)
        self.text()
        self.number()
        self.put(b"tQ")
        self.number()
        self.sequence(depth - 1)
        self.sequence(depth - 1)
        self.put(b"\x89", b"N", b"t", b"R")

    def array(self, depth: int) -> None:
        """Nearly one of NumPy."""
        self.put(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR", b"(K\x01")
        self.sequence(depth - 1)
        self.put(b"cnumpy\ndtype\n(")
        self.text() if self.draws.random() < 0.7 else self.value(depth - 1)
        self.put(b"K\x00K\x01tR", b"\x89")
        self.bytes() if self.draws.random() < 0.7 else self.value(depth - 1)
        self.put(b"t", b"b")

    def huge(self) -> None:
        """What says that it is longer than the file."""
        size = self.draws.choice((2**20, 2**28, 2**31))
        wide = size.to_bytes(8, "little")
        self.put(
            self.draws.choice((b"\x8e" + wide, b"\x96" + wide, b"\x8d" + wide, b"r" + wide[:4], b"\x8b" + wide[:4]))
        )

    def value(self, depth: int) -> None:
        leaves: tuple[Callable[[], None], ...] = (self.plain, self.number, self.text, self.bytes, self.shared)
        nodes = (self.sequence, self.names, self.doubled, self.called, self.called_often, self.tensor, self.array)
        if depth <= 0 or self.length > MOST_BYTES or self.draws.random() < 0.2:
            self.draws.choice(leaves)()
        elif self.draws.random() < 0.01:
            self.huge()
        else:
            self.draws.choice(nodes)(depth)
        if self.draws.random() < 0.2:
            self.keep()


def grown(draws: random.Random) -> bytes:
    """A pickle of a dict of a few values by name, some of them kept sound on the way to the others."""
    grower = Grower(draws)
    grower.put(b"\x80\x02}(")
    for number in range(draws.randrange(1, 4)):
        grower.put(b"X\x01\x00\x00\x00", bytes([97 + number]))
        grower.value(draws.randrange(1, 5))
    grower.put(b"u.")
    return b"".join(grower.parts)
