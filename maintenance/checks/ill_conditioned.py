"""Draw faultless ports that magnify rounding, and ports with one fault in them, and judge each by every door.

  python maintenance/checks/ill_conditioned.py               400 faultless draws and 100 with a fault, in an hour
  python maintenance/checks/ill_conditioned.py --draws 4 --faults 2       a glance

A draw is a stack of layers with 2 to 4 samples in front of batch norm, saturated activations, gains up to 1000, and up
to 12 blocks. It is judged by `align`, `ladder.gradients`, `ladder.backward`, and by `judge` from a recording. A
faultless port must not fail anywhere, and at most 3 in 100 may be refused. Counted apart are those refused in draws of
which float64 itself keeps no digit of the output, as runs of the reference that are made here show. A fault is in a
weight, an epsilon or a gradient; it may pass only where a float64 run of it, made here, is within the limits. A cast to
bfloat16 in float32 must be noticed wherever float32 judges the output or the loss and the cast alone moves it by more
than its limit. Exit status: 0 all holds, 1 not, and the draws that show it are named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from portproof.io.process import use_threads
from sturdyio.cli import ArgumentParser, HelpFormatter, positive_int, run

PROG = "ill_conditioned"
ACTIVATIONS = ("Tanh", "Sigmoid", "ReLU", "Hardswish", "sine")
FAULTY_EPSILON = 1.1e-5
FAULTS = ("weight", "epsilon", "gradient", "bfloat16")
REFUSED_SHARE = 0.03


@dataclass(frozen=True)
class Draw:
    """One network, all of it from its seed."""

    seed: int
    samples: int
    width: int
    blocks: int
    activation: str
    gain: float  # that the input of each activation is multiplied by
    norm: bool
    modes: tuple[str, ...]

    def __str__(self) -> str:
        norm = "batch norm, " if self.norm else ""
        return (
            f"seed {self.seed}: {self.blocks} blocks of {self.width}, {norm}{self.activation}, gain {self.gain:.3g}, "
            f"{self.samples} samples, {' and '.join(self.modes)} mode"
        )

    @property
    def inputs(self) -> list[np.ndarray]:
        """(samples, width, 1, 1), float32."""
        rng = np.random.default_rng([self.seed, 12])
        return [rng.normal(size=(self.samples, self.width, 1, 1)).astype(np.float32)]


def draw_of(seed: int) -> Draw:
    rng = np.random.default_rng([seed, 11])
    norm = bool(rng.integers(4))
    return Draw(
        seed,
        samples=int(rng.integers(2, 5)),
        width=int(rng.choice((4, 8, 16))),
        blocks=int(rng.integers(1, 13)),
        activation=str(rng.choice(ACTIVATIONS)),
        gain=float(10 ** rng.uniform(0, 3 if norm else 1)),
        norm=norm,
        modes=("train",) if rng.integers(2) else ("eval", "train"),
    )


def build(draw: Draw, framework: Any, batch_norm: Callable[[int], Any], sine: Any, fault: str = "") -> Any:
    """The network of a draw in one of the frameworks, with a `fault` in its middle block if one is named."""
    nn, faulty = framework.nn, draw.blocks // 2
    base = nn.Module if hasattr(nn, "Module") else nn.Layer
    convolution = nn.Conv2d if hasattr(nn, "Conv2d") else nn.Conv2D

    class Block(base):
        def __init__(self, fault: str) -> None:
            super().__init__()
            self.fault = fault
            self.conv = convolution(draw.width, draw.width, 1)
            self.norm = batch_norm(draw.width) if draw.norm else None
            self.act = None if draw.activation == "sine" else getattr(nn, draw.activation)()

        def forward(self, x: Any) -> Any:
            x = self.conv(x)
            if self.fault == "bfloat16" and "float32" in str(x.dtype):
                x = x.astype("bfloat16").astype("float32")
            if self.fault == "weight":
                x = x * (1 + 1e-6)
            if self.norm is not None:
                x = self.norm(x)
            if self.fault == "gradient":
                x = x + (x - x.detach()) * 1e-5
            x = x * draw.gain
            return sine(x) if self.act is None else self.act(x)

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block(fault if i == faulty else "") for i in range(draw.blocks)))
            self.last = nn.Linear(draw.width, 4)

        def forward(self, x: Any) -> Any:
            return self.last(self.blocks(x).flatten(1))

    return Net()


def pair_of(draw: Draw, fault: str = "") -> tuple[Any, Any]:
    """(reference, port) of a draw, the fault in the port."""
    import paddle
    import torch

    from mobilenetv3_paddle.models.layers import BatchNorm2D

    torch.manual_seed(draw.seed)
    epsilon = FAULTY_EPSILON if fault == "epsilon" else 1e-5
    ref = build(draw, torch, torch.nn.BatchNorm2d, torch.sin)
    port = build(draw, paddle, lambda width: BatchNorm2D(width, epsilon=epsilon), paddle.sin, fault)
    return ref, port


def mean_square(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def target_of(draw: Draw) -> np.ndarray:
    """(samples, 4), float32."""
    return np.random.default_rng([draw.seed, 13]).normal(size=(draw.samples, 4)).astype(np.float32)


def verdicts_of(draw: Draw, fault: str = "", recorded: bool = True) -> dict[str, Any]:
    """{door: verdict}; the recording is made of the reference alone."""
    import portproof
    from portproof import ladder

    ref, port = pair_of(draw, fault)
    options = {"modes": draw.modes, "seed": draw.seed}
    found = {
        "align": portproof.align(ref, port, draw.inputs, **options),
        "gradients": ladder.gradients(ref, port, draw.inputs, **options),
    }
    if recorded:
        found["judge"] = portproof.judge(port, portproof.record(ref, draw.inputs, **options))
    pair = ladder.same_weights(ref, port, draw.inputs, seed=draw.seed)
    steps = ladder.plain_steps((mean_square, mean_square))
    found["backward"] = ladder.backward(*pair, *steps, [(draw.inputs[0], target_of(draw))])
    return found


def moved_by(draw: Draw, fault: str, door: str) -> dict[str, float]:
    """{"output", "loss", parameter: how far a fault moves it, or its gradient}: float64, train mode, in PyTorch alone.

    What is sent back is the loss's gradient, or, of `align` and `gradients`, what these draw.
    """
    import torch

    from portproof import ladder
    from portproof.ladder.pairs.pair import drawn_cotangents

    ref, _ = ladder.same_weights(*pair_of(draw), draw.inputs, seed=draw.seed)
    epsilon = FAULTY_EPSILON if fault == "epsilon" else 1e-5
    faulty = build(draw, torch, lambda width: torch.nn.BatchNorm2d(width, epsilon), torch.sin, fault)
    faulty.load_state_dict(ref.state_dict())
    results = []
    for model in (ref, faulty):
        model.double().train()
        output = model(torch.from_numpy(draw.inputs[0]).double())
        loss = mean_square(output, torch.from_numpy(target_of(draw)))
        upstream = drawn_cotangents({True: [output.detach().numpy()]}, draw.seed)[True][0]
        (loss if door == "backward" else (output * torch.from_numpy(upstream)).sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"output": output.detach(), "loss": loss.detach(), **gradients})
    return {name: (results[1][name] - array).abs().max().item() for name, array in results[0].items()}


def is_missed(draw: Draw, fault: str, door: str, verdict: Any) -> bool:
    """Whether the fault moves an item that float64 judges by more than twice its limit; rounding may hide one limit."""
    moved = moved_by(draw, fault, door)
    judged = [row for row in verdict.judged if row.item.dtype == "float64" and row.item.mode != "eval"]
    items = [row for row in judged if row.item.kind == "gradient" or row.item.name in ("output", "loss")]
    return any(moved.get(row.item.name, 0.0) > 2 * row.atol for row in items)


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--draws", type=positive_int, default=400, metavar="N", help="how many without a fault")
    parser.add_argument("--faults", type=positive_int, default=100, metavar="N", help="how many with one")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; the others follow")
    return parser


def faultless(seeds: range) -> list[str]:
    """What does not hold of faultless draws, a line each."""
    from portproof.compare import FAIL, REFUSED
    from portproof.report.text import last_line

    wrong, refused, lost, doors = [], [], 0, 0
    for seed in tqdm(seeds, "faultless", disable=None):
        draw = draw_of(seed)
        for door, verdict in verdicts_of(draw).items():
            doors += 1
            if verdict.status == FAIL:
                wrong.append(f"{draw}: {last_line(door, verdict)}")
                tqdm.write(wrong[-1])
            elif verdict.status == REFUSED and not keeps_a_digit(draw):
                lost += 1
            elif verdict.status == REFUSED:
                row = verdict.first_failure
                refused.append(f"{draw}: {door}: {verdict.refusal or (row.reason if row else '')}")
                tqdm.write(f"refused: {refused[-1]}")
    print(f"{len(seeds)} faultless draws, {doors} verdicts: {len(wrong)} alarms, {len(refused) + lost} refused")
    print(f"of those refused {lost} are of draws in which float64 keeps no digit of the output")
    if len(refused) > REFUSED_SHARE * doors:
        wrong.append(f"{len(refused)} of {doors} verdicts refused, first {refused[0]}")
    return wrong


def faulty(seeds: range) -> list[str]:
    """What does not hold of draws with a fault, a line each."""
    from portproof.compare import FAIL, PASS

    wrong, found, hidden = [], 0, 0
    for seed in tqdm(seeds, "faulty", disable=None):
        draw, fault = draw_of(seed), FAULTS[seed % len(FAULTS)]
        if fault == "epsilon" and not draw.norm:
            fault = "weight"
        for door, verdict in verdicts_of(draw, fault, recorded=False).items():
            if verdict.status == FAIL:
                found += 1
            elif fault == "bfloat16" and verdict.status == PASS and cast_is_missed(draw, verdict):
                wrong.append(f"{draw}: {door} passes a cast to bfloat16")
            elif fault != "bfloat16" and verdict.status == PASS and is_missed(draw, fault, door, verdict):
                wrong.append(f"{draw}: {door} passes a fault in {fault} that is above a limit")
            else:
                hidden += 1
    print(f"{len(seeds)} draws with a fault: {found} verdicts find it, in {hidden} it is within the limits or refused")
    return wrong


def keeps_a_digit(draw: Draw) -> bool:
    """Whether float64 does of the reference's output in every mode: moved by 1 ulp, it changes by less than 1/8.

    What is moved are inputs and weights. Of five such runs the largest change counts. 8 times that is the limit, as in
    compare/ruler.py, of which nothing is used here.
    """
    import torch

    from portproof import ladder

    ref, _ = ladder.same_weights(*pair_of(draw), draw.inputs, seed=draw.seed)
    ref.double()
    rng = np.random.default_rng([draw.seed, 14])

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + torch.from_numpy(rng.choice((-1, 1), tuple(tensor.shape)) * 2.0**-52))

    x, parameters = torch.from_numpy(draw.inputs[0]).double(), dict(ref.named_parameters())
    for mode in ("train", *draw.modes):
        ref.train(mode == "train")
        with torch.no_grad():
            own, changes = ref(x), []
            for _ in range(5):
                other = {name: moved(tensor) for name, tensor in parameters.items()}
                changes.append((torch.func.functional_call(ref, other, moved(x)) - own).abs().max())
        if 8 * max(changes) >= own.abs().max():
            return False
    return True


def cast_is_missed(draw: Draw, verdict: Any) -> bool:
    """Whether float32 judges the output or the loss, and the cast alone moves that by more than its limit.

    Behind activations that are saturated it moves nothing. The port's own two runs are in train mode.
    """
    import paddle

    from portproof import ladder

    outputs = []
    for fault in ("", "bfloat16"):
        _, port = ladder.same_weights(*pair_of(draw, fault), draw.inputs, seed=draw.seed)
        port.train()
        outputs.append(port(paddle.to_tensor(draw.inputs[0])).numpy())
    losses = [mean_square(output, target_of(draw)) for output in outputs]
    moved = {"output": np.abs(outputs[1] - outputs[0]).max(), "loss": abs(losses[1] - losses[0])}
    judged = [row for row in verdict.judged if row.item.dtype == "float32" and row.item.mode != "eval"]
    return any(moved.get(row.item.name, 0.0) > row.atol for row in judged)


def main(args: argparse.Namespace) -> int:
    use_threads(None)
    wrong = faultless(range(args.seed, args.seed + args.draws))
    wrong += faulty(range(args.seed, args.seed + args.faults))
    for line in wrong:
        print(f"  {line}")
    print(f"{'FAIL' if wrong else 'PASS'} {PROG}")
    return 1 if wrong else 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
