"""What a command does with its verdicts: prints them, and writes them for programs and as a page."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from portproof.compare import Verdict, exit_status, joined
from portproof.io.cli import naming_extra
from portproof.report.summary import Findings, LadderResult, RungResult, versions, write_verdicts
from portproof.report.text import section_of
from sturdyio.cli import UserError

FLAGS = ("--json", "--report", "--language", "--quiet", "--verbose")


def add_outcome_flags(parser: argparse.ArgumentParser) -> None:
    """Add FLAGS."""
    add = parser.add_argument
    fields = "the page of the API and portproof.report.summary list its fields"
    add("--json", metavar="FILE.json", help=f"write the verdict for programs; {fields}")
    add("--report", metavar="FILE.html", help="write the verdict as a page")
    add("--language", choices=("en", "zh"), default="en", help="of that page: English or Chinese")
    printed = parser.add_mutually_exclusive_group().add_argument
    printed("--quiet", action="store_true", help="print the last line of the verdict only")
    printed("--verbose", action="store_true", help="print what agrees line by line, too")


@dataclass
class Outcome:
    """The verdicts of a command with FLAGS.

    Files of an earlier run are removed first, lest they be taken for this one's. Raises UserError for other suffixes.
    """

    args: argparse.Namespace
    title: str  # "portproof align"
    subject: str  # what is judged
    verdicts: list[Verdict] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        for flag, path, suffix in (("--json", self.args.json, ".json"), ("--report", self.args.report, ".html")):
            if not path:
                continue
            if Path(path).suffix != suffix:
                raise UserError(f"{flag} {path} does not end in {suffix}: choose another name")
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error.strerror}: choose another name") from error

    def say(self, text: str) -> None:
        """Print it unless --quiet."""
        if not self.args.quiet:
            print(text, flush=True)

    def add(self, verdict: Verdict, report: str = "") -> None:
        """Print the verdict, or the `report` of it; with --quiet the last line."""
        self.verdicts.append(verdict)
        text = report or str(verdict)
        print(text.splitlines()[-1] if self.args.quiet else text, flush=True)

    def end(self) -> int:
        """Write the files; the exit status. Raises UserError if a file cannot be written."""
        environment = {"command": shlex.join(["portproof", *sys.argv[1:]])}
        environment |= {name: str(value) for name, value in vars(self.args).items() if name in ("seed", "device")}
        environment |= versions()
        if self.args.json:
            write_verdicts(self.verdicts, self.title, environment, Path(self.args.json))
            self.say(f"wrote {self.args.json}")
        if self.args.report:
            with naming_extra():
                from portproof.report.page import write_page
            found = Findings(self.title, self.verdicts, [section_of] * len(self.verdicts))
            result = RungResult(self.title, self.subject, time.perf_counter() - self.start, found)
            write_page(LadderResult([result], environment), Path(self.args.report), self.args.language)
            self.say(f"wrote {self.args.report}")
        return exit_status(joined(self.title, self.verdicts))
