"""Draw faultless ports at random and count the alarms: there must be none.

  python maintenance/checks/false_alarms.py                  200 draws, in a quarter of an hour on two cores
  python maintenance/checks/false_alarms.py --draws 4        a glance

Each draw has its own model (small or large), mode (eval or train), probe weights, images, batch size and image size.
The port is the project's own, so whatever an item of any draw is outside its limit by is a false alarm. Judged are, as
in steps 01 and 05, every module's output and every gradient and statistic in float64, every output and statistic in
float32 and every layer's gradients alone in float32. The last lines say how near its limit the worst item of each check
came. Exit status: 0 no alarm, 1 alarms, named with the draw's seed.
"""

import argparse
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from mobilenetv3_common.arguments import MODEL_NAMES
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run

PROG = "false_alarms"
SIZES = (64, 96, 128, 160)  # pixels
BATCHES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Draw:
    """One draw, all of it from its seed."""

    seed: int
    model: str
    train: bool
    shape: tuple[int, int, int]  # batch, height, width

    def __str__(self) -> str:
        batch, height, width = self.shape
        return (
            f"seed {self.seed}: {self.model}, {'train' if self.train else 'eval'} mode, {batch} of {height} x {width}"
        )


def draw_of(seed: int) -> Draw:
    rng = np.random.default_rng([seed, 10])
    model, train = MODEL_NAMES[rng.integers(len(MODEL_NAMES))], bool(rng.integers(2))
    return Draw(seed, model, train, (*rng.choice(BATCHES, 1).tolist(), *rng.choice(SIZES, 2).tolist()))


def judged(draw: Draw):
    """The verdicts of one draw."""
    import mobilenetv3_paddle.models
    import mobilenetv3_ref.models
    from portproof.backends.probe import probe_images
    from portproof.ladder.pairs.pair import Options, Pair
    from portproof.ladder.pairs.whole import compare_mode

    images = probe_images(np.random.default_rng([draw.seed, 11]), *draw.shape)
    ref = mobilenetv3_ref.models.MODELS[draw.model](dropout=0.0)
    port = mobilenetv3_paddle.models.MODELS[draw.model](dropout=0.0)
    pair = Pair.prepared(ref, port, [images], Options(seed=draw.seed))
    return [compared.verdict for compared in compare_mode(pair, draw.train)]


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--draws", type=positive_int, default=200, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; the others follow")
    return parser


def main(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative: choose 0 or more")
    try:
        from portproof.compare import NOT_JUDGED, PASS
        from portproof.io.process import use_threads
        from portproof.report.text import row_line
    except ImportError as error:
        raise UserError(f"both frameworks are needed ({error}): pip install -e '.[align]'") from error
    use_threads(None)
    alarms, not_judged, items, worst = 0, 0, 0, {}
    for seed in tqdm(range(args.seed, args.seed + args.draws), "draws", disable=None):
        draw = draw_of(seed)
        for verdict in judged(draw):
            items += len(verdict.rows)
            bad = [row for row in verdict.rows if row.status not in (PASS, NOT_JUDGED)]
            not_judged += len(verdict.not_judged)
            for row in verdict.rows:
                if row.atol > 0:
                    check = f"{row.item.dtype}, {row.item.kind}s"
                    worst[check] = max((row.difference / row.atol, seed, row.name), worst.get(check, (0.0, seed, "")))
            if bad or verdict.refusal:
                alarms += 1
                tqdm.write(f"{draw}: {verdict.title}: {verdict.refusal or row_line(bad[0]).strip()}")
    print(f"{args.draws} draws from seed {args.seed}, {items} items, {not_judged} of them not judged, {alarms} alarms")
    for check, (share, seed, name) in worst.items():
        print(f"  {check}: the worst item came to {share:.2f} of its limit: {name} of {draw_of(seed)}")
    print(f"{'FAIL' if alarms else 'PASS'} {PROG}")
    return 1 if alarms else 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
