"""One step of the ladder while it runs; in code it is a rung."""

from __future__ import annotations

import argparse
import functools
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np

from portproof.backends import backend
from portproof.backends.model import BackendModel
from portproof.compare import FAIL, PASS, Item, Items, Key, Row, Verdict, compare, exit_status, joined
from portproof.compare.accepted import Accepted
from portproof.compare.ruler import UNIT_ROUNDOFF, exact_atol, largest
from portproof.io.cli import PortError
from portproof.io.process import add_threads_flag, proving, run_in_child, use_threads
from portproof.io.records import save_record, save_text
from portproof.ladder.pairs.pair import Pair
from portproof.ladder.pairs.whole import locate_failure
from portproof.mapping.name_map import by_weights
from portproof.python39 import zip_strict
from portproof.report.summary import Findings
from portproof.report.text import block_of, last_line, render, row_line
from sturdyio import cli
from sturdyio.cli import ArgumentParser, HelpFormatter, MachineError, UserError, one_line, output_dir, user_code

if TYPE_CHECKING:
    from typing_extensions import ParamSpec  # not in Python 3.9

    P = ParamSpec("P")
T = TypeVar("T")
Arrays = Mapping[Key, np.ndarray]
FRAMEWORKS = {"reference": "torch", "port": "paddle"}


class ToFillIn(UserError):
    """See `to_fill_in`."""


def to_fill_in(name: str, file: str, what: str) -> ToFillIn:
    """The error to raise where an author has still to write `name` in `file`, which does `what`.

    The step ends in this line and exit status 2, whichever side raises it.
    """
    return ToFillIn(f"fill in {name} in {file}: {what}")


class Ended(Exception):
    """The rung has said why nothing more can be judged; `on_rung` catches this."""


def needed(value: T | None) -> T:
    """`value`; raises Ended where it is None."""
    if value is None:
        raise Ended
    return value


@dataclass(frozen=True)
class RungVerdict(Verdict):
    """A ladder function's verdict; it prints as the report of all its checks."""

    log: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*self.log, last_line(self.title, self)])


class Rung(Findings):
    """Collects verdicts, prints them as they come, and writes the files in the end.

    A `quiet` one prints nothing. `accept`: known differences, as in `portproof.align`.
    """

    def __init__(self, name: str, quiet: bool = False, accept: Sequence[str] = ()) -> None:
        super().__init__(name)
        self.quiet = quiet
        self.accepted = Accepted(accept)
        self.pairs: list[Pair] = []  # compared so far, see `equal_pair`
        self.files: tuple[dict, dict] = ({}, {})  # {name: array} of each side

    def say(self, text: str) -> None:
        """Print the text, and keep it for the log."""
        if not self.quiet:
            print(text, flush=True)
        self.log.append(text)

    def check(self, verdict: Verdict, group: Callable[[Item], str] = block_of) -> bool:
        """Keep and print the verdict, one line per `group`; return whether it passed."""
        verdict = self.accepted.apply(verdict)
        self.verdicts.append(verdict)
        self.groups.append(group)
        self.say(render(verdict, group, self.types))
        return verdict.status == PASS

    def compare(
        self,
        ref: Arrays[Key],
        port: Arrays[Key],
        atol: Mapping[Key, float] | None = None,
        *,
        title: str,
        group: Callable[[Item], str] = str,
        keep: str | None = None,
        expected_zero: Collection[Item | str] = (),
        hints: Mapping[str, str] | None = None,
    ) -> bool:
        """Compare two sides, which must be equal without `atol`; return whether they passed.

        With `keep` they go into the result files, under that prefix. `expected_zero`: items that are zero by structure;
        `hints`: {kind of item: usual causes}.
        """
        if keep is not None:
            self.keep(ref, port, keep)
        limits = exact_atol(ref) if atol is None else atol
        return self.check(compare(ref, port, limits, title=title, expected_zero=expected_zero, hints=hints), group)

    def fail(self, what: str, reason: str) -> None:
        """Count a fault of the port where nothing can be compared."""
        self.check(Verdict(what, [Row(Item(what), FAIL, reason=reason)]), group=str)

    def refuse(self, reason: str, what: str = "what the inputs can prove") -> None:
        """Count a reason why a pass would prove nothing."""
        self.check(Verdict(what, refusal=reason))

    def keep(self, ref: Arrays[Key], port: Arrays[Key], prefix: str = "") -> None:
        """Put arrays, but no strings, into the two result files as PREFIX + item."""
        for file, arrays in zip_strict(self.files, (ref, port)):
            for item, array in arrays.items():
                if np.asarray(array).dtype.kind != "U":
                    file[f"{prefix}{item}"] = np.asarray(array)

    def observe(self, what: str, function: Callable[..., T], ref: Any, port: Any, *args: Any) -> tuple[T, T] | None:
        """What `function` returns for both sides; None, and the step fails, if it raises for the port."""
        of_ref = self.of_ref(what, function, ref, *args)
        of_port = self.of_port(what, lambda: [function(port, *args)])
        return None if of_port is None else (of_ref, of_port[0])

    def of_ref(self, what: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What the reference's `function` returns; all that it raises becomes a UserError about `what`."""
        try:
            with user_code():
                return function(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:  # whatever a user's function may raise
            raised = f"the reference's {what} raised {one_line(error)}"
            raise UserError(f"{raised}: it must run on what it is given") from error

    def of_port(self, what: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """What the port's `function` returns; None, and the step fails, if it raises."""
        try:
            with user_code():
                return function(*args, **kwargs)
        except (ToFillIn, MachineError):
            raise
        except Exception as error:  # whatever a port may raise
            self.say("".join(traceback.format_exception(error)).rstrip())
            self.fail(what, f"the port raised {one_line(error)}")
            return None

    def check_signal(self, outputs: Mapping[Any, np.ndarray]) -> None:
        """Refuse a signal that dies or explodes: any port would pass, or none."""
        for name, array in outputs.items():
            most = largest(array) if array.dtype.kind == "f" else 1
            if not 1e-3 <= most <= 1e6:
                self.refuse(f"the signal is lost at {name}: its largest value is {most:.1e}; use other weights")
                return

    def write(self, folder: str | Path, stem: str, log_stem: str = "", save: Callable = save_record) -> Rung:
        """Write STEM_ref.npy, STEM_paddle.npy and log/STEM_diff.log to `folder`, then print the last line.

        `save` writes arrays to a path. Raises UserError if it cannot write: there is no verdict then.
        """
        for known in self.accepted.known:
            if known.met:  # a project's differences are not all of this step
                self.say(known.note())
        last = last_line(self.name, joined(self.name, self.verdicts))
        folder = output_dir(folder)
        for side, arrays in zip_strict(("ref", "paddle"), self.files):
            save(arrays, folder / f"{stem}_{side}.npy")
        lines = [*self.log, last, "", "every item:"]
        for verdict in self.verdicts:
            lines += [verdict.title, *map(row_line, verdict.rows)]
        save_text("\n".join([*lines, ""]), folder / "log" / f"{log_stem or stem}_diff.log")
        self.say(last)
        return self


QUIET = cast(Rung, None)  # a new one, which prints nothing: see `on_rung`


def check_coefficients(dtype: str) -> None:
    """Raise UserError unless optimizers may keep their coefficients in this precision."""
    if dtype not in UNIT_ROUNDOFF:
        raise UserError(f"coefficients {dtype!r}: choose one of {', '.join(UNIT_ROUNDOFF)}")


def equal_pair(rung: Rung, ref: Any, port: Any, given: Mapping[str, str] | None, device: str) -> Pair:
    """The pair, made once a rung; if weights differ, the rung fails and ends.

    Raises UserError for what is no model.
    """
    ref_model = backend("torch").wrap(ref, "reference", device)
    port_model = backend("paddle").wrap(port, "port", device)
    pair = Pair(ref_model, port_model, given=given)
    for known in rung.pairs:
        assert isinstance(known.ref, BackendModel)
        sides = (known.ref, ref_model), (known.port, port_model)
        same_models = all(old.model is new.model and old.has_weights_of(new) for old, new in sides)
        if same_models and known.given == given:
            return known
    pair.equal_tensors, unequal = by_weights(ref_model, port_model, given)
    rung.types = rung.types or {name: module.type for name, module in pair.ref.modules.items()}
    if unequal is not None:
        rung.check(unequal, group=str)
        raise Ended
    rung.pairs.append(pair)
    return pair


def say_location(rung: Rung, pair: Pair, first: int) -> None:
    """Once a rung: if a verdict from `first` on failed, say where the port departs."""
    every = [[row.status for row in verdict.rows] for verdict in rung.verdicts]
    failed = [i for i, statuses in enumerate(every) if i >= first and FAIL in statuses]
    if not failed or any(verdict.location for verdict in rung.verdicts):
        return
    location = locate_failure(pair, rung.verdicts[first:], accepted=rung.accepted)
    if location is None:
        known = ", or what is accepted" if rung.accepted else ""
        rung.say(f"not located: each module alone gives what the reference's gives{known}; look at what surrounds them")
    else:
        rung.say("\n".join(location.lines()))
        rung.verdicts[failed[0]] = replace(rung.verdicts[failed[0]], location=location)


def of_kinds(items: Items, *kinds: str) -> dict[Item, np.ndarray]:
    return {item: array for item, array in items.items() if item.kind in kinds}


def names_back(names: Mapping[str, str] | None, side: str = "port") -> dict[str, str]:
    """{the side's module: reference's} of `names` {reference's module: port's}."""
    return {own: name for name, own in (names or {}).items()} if side == "port" else {}


def reference_name(tensor: str, back: Mapping[str, str]) -> str:
    """The reference's name of a side's tensor; `back` is that of `names_back`."""
    module, _, leaf = tensor.rpartition(".")
    return ".".join(filter(None, (back.get(module, module), leaf)))


@contextmanager
def processor_time(rung: Rung, what: str) -> Iterator[None]:
    """Print the processor time of the block, child processes included."""
    before = sum(os.times()[:4])
    yield
    rung.say(f"{what}: {sum(os.times()[:4]) - before:.0f} s of processor time")


def on_rung(function: Callable[P, None]) -> Callable[P, RungVerdict]:
    """Make a function return the verdict on the checks that it puts into `rung`, by default QUIET."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> RungVerdict:
        kwargs["rung"] = rung = cast(Rung, kwargs.get("rung") or Rung(function.__name__, quiet=True))
        checks, lines = len(rung.verdicts), len(rung.log)
        with user_code(), suppress(Ended):
            function(*args, **kwargs)
        every = joined(function.__name__, rung.verdicts[checks:])
        return RungVerdict(**vars(every), log=rung.log[lines:])

    return wrapped


def rung_parser(prog: str, description: str, folder: str | Path = "result") -> argparse.ArgumentParser:
    """A parser with the flags every step has: --device, --threads, --seed, --output-dir (by default `folder`)."""
    parser = ArgumentParser(prog=prog, description=description, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where both sides run")
    add_threads_flag(parser)
    add("--seed", type=cli.seed, default=0, help="of inputs and probe weights")
    add("--output-dir", default=str(folder), help="where results and the log are written")
    return parser


def run_rung(name: str, main: Callable[[argparse.Namespace], Rung], parser: argparse.ArgumentParser) -> NoReturn:
    """Run a step as a command, and exit with its status: `main` gets the flags, and returns the rung.

    A port that raises fails it, with a traceback. A UserError is one line on stderr and status 2. On Linux `main` runs
    in a child process: code that ends it is noticed, and the status is 2. Where PyTorch was imported
    before, it takes one thread unless --threads says more: then the script must have computed nothing until now.
    """

    def guarded() -> int:
        args = parser.parse_args()
        args.output_dir = str(Path(args.output_dir).absolute())  # a rung may change the folder
        use_threads(args.threads)
        try:
            with user_code(), proving():
                return exit_status(main(args))
        except (UserError, PortError):
            raise
        except Exception as error:
            traceback.print_exc()
            print(f"FAIL {name}: it raised {one_line(error)}", flush=True)
            return FAIL

    run_in_child(guarded, name)
