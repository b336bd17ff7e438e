"""The training runs of one side, one after the other, in a process of its own.

    python -m portproof.ladder.workers.run_worker FOLDER SIDE

FOLDER/SIDE.json is what `runs.launch` writes; FOLDER/SIDE.NAME.npz becomes the record of each run. Ends with status 1
and the error in the last line if a run raises, MISTAKE if that is a user's.
"""

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from portproof.io.cli import resolve
from sturdyio.cli import UserError, one_line, user_code

MISTAKE = 65  # EX_DATAERR; not 2, with which a run may end by itself


def checked(record: object) -> dict[str, np.ndarray]:
    """What a run returned as arrays; raises TypeError for anything but a dict of arrays of numbers by name."""
    if not isinstance(record, Mapping):
        raise TypeError(f"the run returned {type(record).__name__}, not a dict of arrays")
    arrays = {str(name): np.asarray(value) for name, value in record.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise TypeError(f"the run returned {name!r} with dtype {array.dtype}, not an array of numbers")
    return arrays


def main(folder: Path, side: str) -> None:
    job = json.loads((folder / f"{side}.json").read_text(encoding="utf-8"))
    run = resolve(job["run"], side)
    for name, draw in job["runs"].items():
        record = checked(run(**draw, options=job["options"]))
        np.savez(folder / f"{side}.{name}.npz", **record)
        print(f"{side} {name}: {len(record)} arrays", flush=True)


if __name__ == "__main__":
    try:
        with user_code():
            main(Path(sys.argv[1]), sys.argv[2])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(MISTAKE)
    except Exception as error:  # whatever a run may raise
        traceback.print_exc()
        print(one_line(error), file=sys.stderr)
        sys.exit(1)
