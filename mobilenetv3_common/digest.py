"""What tells whether a checkpoint is the one that was written."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def digest(content: Any) -> str:
    """A SHA-256 of nested containers of tensors or arrays and plain values, in hexadecimal.

    It finds damage that the reader of a file does not: a changed byte in a tensor is a tensor all the same.
    """
    sha256 = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            sha256.update(f"{{{len(value)}".encode())
            for key, item in value.items():
                sha256.update(repr(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            sha256.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        elif hasattr(value, "shape"):
            array = value.detach().cpu().numpy() if hasattr(value, "detach") else value
            sha256.update(f"{array.dtype}{array.shape}".encode())
            sha256.update(np.ascontiguousarray(array).data)
        else:
            sha256.update(repr(value).encode())

    add(content)
    return sha256.hexdigest()
