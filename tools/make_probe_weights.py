"""Write probe weights, made from a seed, so that predicting, converting and training can be tried without a download.

  python tools/make_probe_weights.py probe.pdparams
  python tools/make_probe_weights.py --num-classes 10 probe.pth          to train on lite_data from, say

Under probe weights every layer is busy, so that no fault of a port can hide (portproof.backends.probe), but they have
learned nothing, and what they predict means nothing. One seed gives the same network in every format.
"""

import argparse
from pathlib import Path

from mobilenetv3_common.arguments import MODEL_NAMES
from portproof.convert.rules import torch_to_paddle
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run, seed, whole_number

PROG = "make_probe_weights"
SUFFIXES = (".pth", ".pt", ".safetensors", ".pdparams")


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add(
        "output",
        metavar="OUTPUT",
        type=Path,
        help="file to write: .pth, .pt or .safetensors for PyTorch, .pdparams for PaddlePaddle",
    )
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add("--num-classes", type=whole_number(1, 1_000_000), default=1000, metavar="N", help="outputs of the last layer")
    add("--seed", type=seed, default=0, help="of the weights")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.output.suffix not in SUFFIXES:
        raise UserError(f"output {args.output} ends in none of {', '.join(SUFFIXES)}: choose one of these suffixes")
    try:
        import mobilenetv3_paddle.models as port
        import mobilenetv3_ref.models as ref
        from portproof.backends import backend
        from portproof.backends.probe import probe_weights
    except ImportError as error:
        raise UserError(f"both frameworks are needed ({error}): pip install -e '.[align]'") from error

    # No dropout: its masks, drawn by PyTorch, would reach the weights behind it.
    model = ref.MODELS[args.model](num_classes=args.num_classes, dropout=0.0)
    arrays = probe_weights(model, args.seed)
    if args.output.suffix == ".pdparams":
        port_model = port.MODELS[args.model](num_classes=args.num_classes)
        port.load_state_dict(port_model, torch_to_paddle(arrays, backend("torch").layers.types(model)))
        port.save_weights(port_model, args.output)
    else:
        ref.save_weights(model, args.output)
    print(f"wrote {args.output}: probe weights of {args.model}, {args.num_classes} classes, seed {args.seed}")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
