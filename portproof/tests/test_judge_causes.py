"""The cause that `judge` names where PyTorch is not: from the recording alone, in the words of `align`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faulty_ports import LAYERS, port
from toy_pairs import Ref, normal

import portproof

T = torch.nn
EVAL, TRAIN = ("eval",), ("train",)
ROWS, IMAGES = normal(5, 5, 6), normal(2, 4, 6, 6)


def body(m, x):
    return torch.tanh(m.b(m.a(x)))


def block(code=body):
    return Ref(code, a=T.Linear(6, 6), b=T.Linear(6, 6))


class NormOverChannels(T.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


CASES = {  # (the reference's layer, modes, the cause; "" where it needs the reference)
    "batch norm, epsilon": (T.BatchNorm2d(4), EVAL, "epsilon is 0.001, not 1e-05"),
    "layer norm, epsilon": (T.LayerNorm(6), EVAL, "epsilon is 1e-06, not 1e-05"),
    "layer norm over channels": (NormOverChannels(4), EVAL, "epsilon is 0.001, not 1e-05"),
    "batch norm with its activation": (T.BatchNorm2d(4), EVAL, "epsilon is 0.001, not 1e-05"),
    "group norm, epsilon": (T.GroupNorm(2, 4), EVAL, "epsilon is 0.001, not 1e-05"),
    "group norm, groups": (T.GroupNorm(2, 4), EVAL, "it has 4 groups, not 2"),
    "instance norm, epsilon": (T.InstanceNorm2d(4, affine=True), EVAL, "epsilon is 2.5e-05, not 1e-05"),
    "RMS norm, epsilon": (T.RMSNorm(6), EVAL, "epsilon is 1e-05, not the dtype's own"),
    "momentum's convention": (T.BatchNorm2d(4), TRAIN, "momentum=0.1; write 0.9 (Paddle: weight of the OLD value)"),
    "momentum": (T.BatchNorm2d(4), TRAIN, "the batch's weight in the running statistics is 0.03, not 0.1"),
    "biased variance": (
        T.BatchNorm2d(4), TRAIN, "the running variance is the biased one, sum / n (torch's is sum / (n - 1))"
    ),
    "statistics not updated": (T.BatchNorm2d(4), TRAIN, "the running statistics are not updated"),
    "leaky ReLU's slope": (
        T.LeakyReLU(), EVAL, "it is leaky ReLU, slope 0.15, not LeakyReLU, negative_slope 0.01"
    ),
    "ReLU6": (T.ReLU(), EVAL, "it is ReLU6, not ReLU"),
    "hard-sigmoid": (
        T.Hardsigmoid(), EVAL, "it is hard-sigmoid with slope 0.1666667, Paddle's default, not Hardsigmoid"
    ),
    "GELU": (T.GELU(), EVAL, "it is GELU, the tanh approximation, not GELU, approximate none"),
    "ELU's alpha": (T.ELU(), EVAL, "it is ELU, alpha 0.7, not ELU, alpha 1.0"),
    "softmax's axis": (T.Softmax(-1), EVAL, "it is over axis 1, not -1"),
    "a logarithm": (T.Softmax(-1), EVAL, "it is LogSoftmax, not Softmax"),
    "dropout that scales later": (
        T.Dropout(0.25), EVAL,
        "it gives 0.75 times its input where nothing is dropped (Paddle's mode downscale_in_infer)",
    ),
    "a weight not transposed": (
        T.Linear(6, 6), EVAL, "the weight is not transposed (Paddle keeps it as in x out)"
    ),
    "no bias": (T.Conv2d(4, 4, 1), EVAL, "the bias is missing, or zero"),
    "axes exchanged": (block(), EVAL, "axes 0 and 1 are exchanged"),
    "an axis reversed": (block(), EVAL, "axis 1 is reversed"),
    "its input": (block(), EVAL, "it returns its input unchanged"),
    "a residual missing": (
        block(lambda m, x: x + body(m, x)), EVAL, "it does not add its input (a residual connection is missing)"
    ),
    "a residual too many": (block(), EVAL, "it adds its input (a residual connection too many)"),
    "a factor": (block(), EVAL, "it is 2 times the reference's, everywhere"),
    "a shift": (block(), EVAL, "it is the reference's plus 0.25, everywhere"),
    "an activation": (block(), EVAL, "swish is applied to what it returns"),
    "padding": (T.Conv2d(4, 4, 3, padding=1), EVAL, ""),
    "a setting of the block": (block(), EVAL, ""),
}  # fmt: skip
NEED_TORCH = {"padding": "padding is 0, not 1"}
NOT_TRIED = "causes not tried: those of a Conv2d that need torch and the reference"


def pair(name: str):
    layer, modes, _ = CASES[name]
    images = port(name).first.weight.ndim == 4
    first = T.Conv2d(4, 4, 1) if images else T.Linear(6, 6)
    behind = T.ReLU() if name == "batch norm with its activation" else T.Identity()
    return (
        Ref(lambda m, x: m.behind(m.layer(m.first(x))), first=first, layer=layer, behind=behind),
        [IMAGES if images else ROWS],
        modes,
    )


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, tuple[str, list[str], list[str]]]:
    """{case: (module, causes, proof)} of `judge` in a process that cannot import torch."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in LAYERS:
        ref, inputs, modes = pair(name)
        portproof.record(ref, inputs, modes=modes).save(folder / f"{name}.safetensors")
    source, here = Path(portproof.__file__).parent.parent, Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(here / "faulty_ports.py"), str(folder)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", LAYERS)
def test_the_cause_is_named_without_torch_and_in_the_words_of_align(judged, name):
    at, causes, proof = judged[name]
    ref, inputs, modes = pair(name)
    cause = CASES[name][2]
    assert at == "layer" and causes == ([cause] if cause else []), (at, causes, proof)
    assert (NOT_TRIED in proof) == (name in NEED_TORCH)
    assert not any("not tried" in line for line in proof if line != NOT_TRIED)
    aligned = portproof.align(ref, port(name), inputs, modes=modes).location
    assert aligned.name == at and aligned.diagnosis == ([NEED_TORCH[name]] if name in NEED_TORCH else causes)
