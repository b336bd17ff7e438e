"""The curves of a run, for the framework's own viewer: TensorBoard or VisualDL."""

from pathlib import Path

from sturdyio.cli import UserError


class EventLog:
    """Numbers by step, in `folder`, which `tensorboard --logdir FOLDER` draws.

    A run that is resumed after `first_step` hides what the interrupted one wrote beyond it.

    Raises UserError when TensorBoard is missing. TensorBoard keeps float32; the exact numbers are in metrics.jsonl.
    """

    def __init__(self, folder: str | Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"--event-log needs TensorBoard ({error}): pip install tensorboard") from error
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Append each number under its name, `train/loss` say; on disk when this returns."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
