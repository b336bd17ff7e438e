"""Find the first module at which a port departs from its reference, prove it, and say why.

  python tools/locate.py                                  this project's own pair
  python tools/locate.py --ref torchvision.models:resnet18 --port my_port.resnet:resnet18 --input 4,3,224,224

Each module is run alone on both sides, on what the reference's received: forward, then backward, in eval and in train
mode, in float64 and, if nothing departs there, in float32. Exit status: 0 no module departs, 1 one does, 2 could not
tell. `python -m portproof` takes the same flags and judges every tensor.
"""

import argparse

from mobilenetv3_common.arguments import MODEL_NAMES
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, run

PROG = "locate"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", choices=MODEL_NAMES, help="this project's own pair, without --ref and --port")
    try:
        from portproof.commands.arguments import add_pair_arguments
    except ImportError as error:
        raise UserError(f"both frameworks are needed ({error}): pip install -e '.[align]'") from error
    add_pair_arguments(parser, required=False)
    return parser


def main(args: argparse.Namespace) -> int:
    from portproof.commands.arguments import load_pair, read_map
    from portproof.ladder.whole import search

    if bool(args.ref) != bool(args.port):
        raise UserError("--ref and --port are a pair: give both, or neither for this project's own")
    if args.ref and args.model:
        raise UserError("--model names this project's own pair: leave it out with --ref and --port")
    if not args.ref:
        model = args.model or MODEL_NAMES[0]
        args.ref, args.port = f"mobilenetv3_ref.models:{model}", f"mobilenetv3_paddle.models:{model}"
    names = read_map(args.map)
    ref, port, inputs, weights = load_pair(args)
    print(f"{args.port} against {args.ref}, {args.device}, seed {args.seed}, {weights} weights", flush=True)
    location, how = search(ref, port, inputs, names, weights, args.seed, args.device)
    print(how)
    print(
        "\n".join(location.lines()) if location else "not located: each module alone gives what the reference's gives"
    )
    return 1 if location else 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
