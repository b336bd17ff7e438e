"""One backend a framework: nothing else builds, runs, traces or reads a model. `backend("torch")` is the door.

`base.py` and `model.py` hold what is made of a framework's operations, once for all of them; `torch_backend.py` and
`paddle_backend.py` what a framework does in its own way; `fp64_torch.py` and `fp64_paddle.py` its float64 arithmetic
without float32 constants. Importing this package imports no framework.
"""

import importlib
from functools import cache

from portproof.backends.base import Backend


@cache
def backend(name: str) -> Backend:
    """The backend of "torch" or "paddle", which is imported now; raises ImportError where it is not installed."""
    return importlib.import_module(f".{name}_backend", __name__).BACKEND
