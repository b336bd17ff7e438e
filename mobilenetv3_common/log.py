"""The training log: one line an interval, in the form of the reproduction guide's section 3.10."""

import time
from collections.abc import Callable
from datetime import timedelta


class TrainingLog:
    """Measures one process's epoch of training and writes a line now and then.

    Call `batch_read()` when a batch has arrived and `batch_done(...)` when it has been trained on. A line covers the
    batches since the one before: acc (share of right predictions, 0 to 1), costs (seconds per batch, without the time
    to write lines), avg_samples (images per batch) and avg_ips (images per second); its loss is the last batch's. With
    `epochs`, the number of all, it ends in eta: what their batches will take at this pace, evaluation not included.
    """

    def __init__(
        self,
        epoch: int,
        num_batches: int,
        print_freq: int,
        log: Callable[[str], None] = print,
        *,
        first_batch: int = 0,
        epochs: int | None = None,
    ) -> None:
        self.epoch = epoch
        self.num_batches = num_batches
        self.print_freq = print_freq
        self.log = log
        self.epochs = epochs
        self.batch_idx = first_batch - 1
        self._reset()

    def _reset(self) -> None:
        self.reader_cost = self.train_cost = 0.0
        self.batches = self.samples = self.correct = 0
        self.clock = time.perf_counter()

    def _lap(self) -> float:
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before

    def batch_read(self) -> None:
        """The loader has delivered a batch."""
        self.reader_cost += self._lap()

    def batch_done(self, loss: float, lr: float, correct: int, samples: int) -> bool:
        """The batch is trained on; writes a line at batches print_freq, 2 * print_freq, ... from 0, and at the last.

        Returns whether it did.
        """
        self.train_cost += self._lap()
        self.batch_idx += 1
        self.batches += 1
        self.samples += samples
        self.correct += correct
        last = self.batch_idx == self.num_batches - 1
        due = last or (self.batch_idx > 0 and self.batch_idx % self.print_freq == 0)
        if due:
            self.log(self._line(loss, lr))
            self._reset()
        return due

    def _line(self, loss: float, lr: float) -> str:
        cost = self.reader_cost + self.train_cost
        return (
            f"[Epoch {self.epoch}, iter: {self.batch_idx}] acc: {self.correct / self.samples:.5f}, lr: {lr:.5f}, "
            f"loss: {loss:.5f}, avg_reader_cost: {self.reader_cost / self.batches:.5f} sec, "
            f"avg_batch_cost: {cost / self.batches:.5f} sec, avg_samples: {self.samples / self.batches}, "
            f"avg_ips: {self.samples / cost:.5f} images/sec.{self._eta(cost / self.batches)}"
        )

    def _eta(self, batch_cost: float) -> str:
        if self.epochs is None:
            return ""
        left = (self.epochs - self.epoch) * self.num_batches - self.batch_idx - 1
        return f", eta: {timedelta(seconds=round(left * batch_cost))}"


def evaluation_line(epoch: int | None, metrics: dict[str, float], what: str = "Eval") -> str:
    """The line of an evaluation: mean loss, top1 and top5 as shares (0 to 1), number of images."""
    place = what if epoch is None else f"{what}, Epoch {epoch}"
    return (
        f"[{place}] top1: {metrics['top1']:.5f}, top5: {metrics['top5']:.5f}, loss: {metrics['loss']:.5f}, "
        f"samples: {int(metrics['samples'])}"
    )
