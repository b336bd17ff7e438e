"""The curves of a run, for the framework's own viewer: TensorBoard or VisualDL."""

from pathlib import Path

from sturdyio.cli import UserError


class EventLog:
    """Numbers by step, in `folder`, which `visualdl --logdir FOLDER` draws.

    Paddle: VisualDL draws only the newest file of a folder, so each start has a folder of its own, and a run that is
    resumed after `first_step` is drawn beside what the interrupted one wrote.

    Raises UserError when VisualDL is missing. VisualDL keeps float32; the exact numbers are in metrics.jsonl.
    """

    def __init__(self, folder: str | Path, first_step: int = 0) -> None:
        try:
            from visualdl import LogWriter  # Paddle: its viewer
        except ImportError as error:
            raise UserError(f"--event-log needs VisualDL ({error}): pip install visualdl") from error
        self.writer = LogWriter(str(Path(folder) / f"from_step_{first_step}"))  # Paddle: see EventLog

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Append each number under its name, `train/loss` say; on disk when this returns."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
