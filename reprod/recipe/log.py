"""The training log: one line an interval, in the form of the reproduction guide's section 3.10."""

import time


class TrainingLog:
    """Measures an epoch of training and says when a line is due, and what it says.

    Call `batch_read()` when a batch has arrived and `batch_done(...)` when it has been trained on. Costs are seconds
    per batch and cover the interval since the last line, as do `acc` (share of right predictions, 0 to 1) and
    `avg_ips` (images per second, of this process); `loss` is the last batch's.
    """

    def __init__(self, epoch: int, num_batches: int, print_freq: int) -> None:
        self.epoch = epoch
        self.num_batches = num_batches
        self.print_freq = print_freq
        self.batch_idx = -1
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

    def batch_done(self, loss: float, lr: float, correct: int, samples: int) -> str | None:
        """The batch is trained on: the log line if one is due (every `print_freq` batches and at the end)."""
        self.train_cost += self._lap()
        self.batch_idx += 1
        self.batches += 1
        self.samples += samples
        self.correct += correct
        last = self.batch_idx == self.num_batches - 1
        if not last and (self.batch_idx == 0 or self.batch_idx % self.print_freq):
            return None
        cost = self.reader_cost + self.train_cost
        line = (
            f"[Epoch {self.epoch}, iter: {self.batch_idx}] acc: {self.correct / self.samples:.5f}, lr: {lr:.5f}, "
            f"loss: {loss:.5f}, avg_reader_cost: {self.reader_cost / self.batches:.5f} sec, "
            f"avg_batch_cost: {cost / self.batches:.5f} sec, avg_samples: {self.samples / self.batches}, "
            f"avg_ips: {self.samples / cost:.5f} images/sec."
        )
        self._reset()
        return line


def evaluation_line(epoch: int | None, metrics: dict[str, float]) -> str:
    """The line of an evaluation: mean loss, top1 and top5 as shares (0 to 1), number of images."""
    place = "Eval" if epoch is None else f"Eval, Epoch {epoch}"
    return (
        f"[{place}] top1: {metrics['top1']:.5f}, top5: {metrics['top5']:.5f}, loss: {metrics['loss']:.5f}, "
        f"samples: {int(metrics['samples'])}"
    )
