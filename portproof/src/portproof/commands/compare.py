"""Compare two result files that anybody wrote: reprod_log's .npy, a plain .npy, .npz, or .safetensors.

  portproof compare forward_ref.npy forward_paddle.npy --fp64-ref forward_ref_float64.npy
  portproof compare forward_ref.npy forward_paddle.npy --rtol 1e-6

reprod_log's files are pickles, which may call any function when they are read: here nothing but arrays is read out of
them, and a file that asks for more is refused. The verdict is the ladder's own: missing and extra items, shapes,
dtypes, NaN and the largest difference are judged, not the mean. No tolerance is assumed: with --fp64-ref, the
reference's own run in float64, the limit is derived from the reference's distance to it; with --rtol it is that share
of an item's largest value, with --atol that number, with both their sum. Whole numbers and text have to be equal. NaN
fails; with --equal-nan it may stand where the other side has it too, but alone it proves nothing. Exit status: 0 within
the limits, 1 not, 2 could not compare.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from portproof.commands.outcome import Outcome, add_outcome_flags
from portproof.compare import NOT_JUDGED, Row, compare
from portproof.compare.ruler import kernel_atol, largest
from portproof.report.text import render_items
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, existing_file
from sturdyio.files import load_npy, load_npz, load_safetensors

PROG = "portproof compare"
WIDE = {"f": np.float64, "c": np.complex128}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("ref", metavar="REF", help="the reference's file")
    add("port", metavar="PORT", help="the port's file")
    add("--fp64-ref", metavar="FILE", help="the reference's items again, computed in float64")
    add("--rtol", type=float, metavar="X", help="allowed share of an item's largest value, 0 or more")
    add("--atol", type=float, metavar="X", help="allowed difference, 0 or more")
    nan = "NaN on both sides, at one place, is no difference; an item of NaN alone is not judged"
    add("--equal-nan", action="store_true", help=nan)
    add_outcome_flags(parser)
    return parser


def read(path: str, what: str) -> dict[str, np.ndarray]:
    suffix = existing_file(path, what).suffix
    if suffix == ".safetensors":
        return load_safetensors(path)
    if suffix == ".npz":
        return load_npz(path, what)
    if suffix != ".npy":
        raise UserError(f"{what} {path} is neither .npy nor .npz nor .safetensors: save it as one of these")
    return load_npy(path)


def atol_of(args: argparse.Namespace, ref: dict[str, np.ndarray]) -> dict[str, float]:
    floats = {name: array for name, array in ref.items() if array.dtype.kind in "fc"}
    wide = {name: WIDE[array.dtype.kind] for name, array in floats.items()}
    if args.fp64_ref is None:
        rtol, atol = args.rtol or 0.0, args.atol or 0.0
        limits = {name: atol + rtol * largest(array.astype(wide[name])) for name, array in floats.items()}
    else:
        fp64_ref = read(args.fp64_ref, "fp64 reference")
        for name, array in floats.items():
            exact = fp64_ref.get(name)
            if exact is None or exact.shape != array.shape or exact.dtype != wide[name]:
                what = f"{wide[name].__name__} {name} of shape {array.shape}"
                raise UserError(f"fp64 reference {args.fp64_ref} has no {what}: write it again")
        limits = kernel_atol({name: fp64_ref[name] for name in floats}, floats)
    return dict.fromkeys(ref, 0.0) | limits


def check(args: argparse.Namespace) -> None:
    given = {"--rtol": args.rtol, "--atol": args.atol}
    if (args.fp64_ref is None) == all(value is None for value in given.values()):
        raise UserError("no tolerance is assumed: give --fp64-ref, or --rtol or --atol or both")
    for flag, value in given.items():
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{flag} {value} is no limit: choose 0 or more, such as 1e-6")


def without_common_nan(ref: dict[str, np.ndarray], port: dict[str, np.ndarray]) -> dict[str, int]:
    """Put zeros where both sides have NaN; {item: how many places these are}."""
    counts = {}
    for name in ref.keys() & port.keys():
        arrays = ref[name], port[name]
        if arrays[0].shape == arrays[1].shape and all(array.dtype.kind in "fc" for array in arrays):
            both = np.isnan(arrays[0]) & np.isnan(arrays[1])
            counts[name] = int(both.sum())
            ref[name], port[name] = (np.where(both, array.dtype.type(0), array) for array in arrays)
    return counts


def without_number(row: Row) -> Row:
    return replace(row, status=NOT_JUDGED, reason="it is NaN everywhere on both sides")


def main(args: argparse.Namespace) -> int:
    check(args)
    name = Path(args.port).name
    outcome = Outcome(args, PROG, name)
    ref, port = read(args.ref, "reference"), read(args.port, "port")
    nans = without_common_nan(ref, port) if args.equal_nan else {}
    verdict = compare(ref, port, atol_of(args, ref), title=name)
    if any(nans.values()):
        no_number = [item for item, count in nans.items() if count and count == ref[item].size]
        rows = [without_number(row) if row.name in no_number else row for row in verdict.rows]
        verdict = replace(verdict, rows=rows, caveats=[f"{sum(nans.values())} values are NaN on both sides"])
    outcome.add(verdict, render_items(verdict, fold=not args.verbose))
    return outcome.end()
