"""Write scikit-learn's handwritten digits as an image folder in ImageNet's layout: real data, learned in minutes.

  python tools/make_digits.py --output-dir digits

1797 grey images of 10 classes, 8 x 8 pixels (sklearn.datasets.load_digits, from the UCI repository; Alpaydin and Kaynak
1998). Every fifth image of each class goes to val/, the others to train/, on every call the same ones. A good
classifier has more than 98 % of val/ right. A folder that holds the set already is left as it is.
"""

import argparse
from pathlib import Path

from mobilenetv3_common.digits import write_digits
from sturdyio.cli import ArgumentParser, HelpFormatter, positive_int, run

PROG = "make_digits"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, default=argparse.SUPPRESS, help="folder to write; new, or empty")
    add("--train-per-class", type=positive_int, metavar="N", help="only the first N images of each class in train/")
    add("--val-per-class", type=positive_int, metavar="N", help="the same for val/")
    return parser


def main(args: argparse.Namespace) -> None:
    train, val = write_digits(args.output_dir, args.train_per_class, args.val_per_class)
    print(f"{args.output_dir} holds {train} + {val} images")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
