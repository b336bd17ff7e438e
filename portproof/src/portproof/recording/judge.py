"""`portproof.judge`: a port judged against a recorded reference, as `align` judges it against one that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from portproof.ladder.pairs import whole
from portproof.recording.file import Recording
from portproof.recording.model import not_alone_note
from sturdyio.cli import UserError


def judge(
    port: Any,
    recording: Recording | str | Path,
    names: Mapping[str, str] | None,
    own_weights: bool,
    modes: Sequence[str] | None,
    precisions: Sequence[str],
    leave_out: Sequence[str],
    outputs: Mapping[str, str] | None,
    device: str,
) -> whole.AlignVerdict:
    """What `portproof.judge` does."""
    if not isinstance(recording, Recording):
        recording = Recording.load(recording)
    ref = recording.model()
    modes = ref.modes if modes is None else modes
    if not set(modes) <= set(ref.modes):
        raise UserError(f"modes {modes!r}: the reference was recorded in {' and '.join(ref.modes)} mode: judge these")
    if own_weights and ref.weights == "probe":
        raise UserError("the port's own weights have no equal in a recording of probe weights: record the reference's")
    weights = "own" if own_weights else "reference"
    options = modes, precisions, leave_out, outputs, ref.seed, device
    verdict = whole.judge(ref, port, ref.inputs, names, weights, *options)
    notes = [recording.about(), *not_alone_note(ref.not_alone), *verdict.notes]
    return replace(verdict, title="judge", notes=notes)
