"""What the kit's tests share."""

import os
from importlib.util import find_spec

import numpy as np
import pytest

# Without what exports graphs and runs them these tests cannot be imported; DEPLOY_REQUIRED=1 makes that an error.
EXPORTERS = ("onnx", "onnxruntime", "onnxscript", "paddle2onnx")
if os.environ.get("DEPLOY_REQUIRED") != "1" and not all(map(find_spec, EXPORTERS)):
    collect_ignore = ["test_judge_onnx.py"]


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of the test's own."""
    return np.random.default_rng(0)
