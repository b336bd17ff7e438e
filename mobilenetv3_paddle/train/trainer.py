"""A training run: epoch after epoch, saved so that it can be stopped at any moment and ends all the same."""

import argparse
import math
import shutil
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path

from paddle import nn

from mobilenetv3_common.arguments import check_resumed
from mobilenetv3_common.log import evaluation_line
from mobilenetv3_common.metrics import NAME, MetricsLog
from mobilenetv3_common.preemption import StopRequest
from mobilenetv3_common.sampler import describe_images
from mobilenetv3_common.seeds import derive_seed
from mobilenetv3_paddle.data import build_mix, set_epoch
from mobilenetv3_paddle.data.loader import DataLoader
from mobilenetv3_paddle.device import seed_everything
from mobilenetv3_paddle.models import save_weights
from sturdyio.cli import Stopped, UserError, output_dir
from sturdyio.files import atomic_path
from sturdyio.locks import FolderLock

from .checkpoint import SUFFIX, TrainingState, read_checkpoint, restore, save_checkpoint
from .distributed import all_reduce_sum, broadcast_buffers, data_parallel, launched_rank, log
from .engine import Hooks, Settings, evaluate, train_one_epoch
from .event_log import EventLog


class Trainer:
    """All of a run but what it is made of, which `main` builds."""

    def __init__(
        self,
        args: argparse.Namespace,
        state: TrainingState,
        criterion: nn.Layer,
        train_loader: DataLoader,
        val_loader: DataLoader,
        device: str,
        stop: StopRequest,
    ) -> None:
        self.args = args
        self.state = state
        self.model = state.model
        self.criterion = criterion
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.device = device
        self.stop = stop
        images = train_loader.dataset
        self.data = describe_images(images.root, images.samples, images.classes)
        self.rank, _, self.world_size = launched_rank()
        self.accumulation_steps = args.gradient_accumulation_steps

    def train(self) -> None:
        """Train what is left of --epochs.

        Raises UserError for a checkpoint that does not fit, for an output folder that another run has and where
        training fails, Stopped once `stop` is asked for and all is saved.
        """
        first_epoch, first_batch = self.resume()
        self.out = output_dir(self.args.output_dir)
        self.lock = FolderLock(self.out, log)
        self.begin = {"epoch": first_epoch, "step": self.step(first_epoch, first_batch)}
        with self.lock if self.rank == 0 else nullcontext():
            model = data_parallel(self.model)
            for epoch in range(first_epoch, self.args.epochs):
                self.train_epoch(model, epoch, first_batch)
                self.end_epoch(epoch)
                first_batch = 0
            if self.rank == 0:
                self.metrics.close()
                if self.args.event_log:
                    self.events.close()

    def resume(self) -> tuple[int, int]:
        """Restore the checkpoint --resume, if there is one -> (epoch, batch) to go on with."""
        path = self.args.resume
        if not path:
            return 0, 0
        content = read_checkpoint(path)
        epoch, batch = content["epoch"], content["batch"]
        check_resumed(self.args, content, self.world_size, self.data)
        restore(self.state, content, path)
        log(f"resumed from {path} at epoch {epoch}" + (f", iter {batch}" if batch else ""))
        return epoch, batch

    @cached_property
    def metrics(self) -> MetricsLog:
        """metrics.jsonl, opened with the first line or checkpoint: a run that never comes so far leaves it alone."""
        metrics = MetricsLog(self.out / NAME, **self.begin)
        if metrics.aside:
            log(f"the record of an earlier run is now {metrics.aside}")
        return metrics

    @cached_property
    def events(self) -> EventLog:
        """The curves for a viewer."""
        return EventLog(self.out / "events", self.begin["step"])

    def step(self, epoch: int, batches: int) -> int:
        """How many steps of the optimizer lie before the batch after `batches` of `epoch`."""
        size = self.accumulation_steps
        return epoch * math.ceil(len(self.train_loader) / size) + math.ceil(batches / size)

    def train_epoch(self, model: nn.Layer, epoch: int, first_batch: int) -> None:
        """Every batch from `first_batch` on; `model` is the one whose backward averages over the processes."""
        args, state = self.args, self.state
        set_epoch(self.train_loader, epoch, first_batch)
        alphas = {"mixup_alpha": args.mixup_alpha, "cutmix_alpha": args.cutmix_alpha}
        settings = Settings(
            print_freq=args.print_freq,
            epochs=args.epochs,
            first_batch=first_batch,
            freeze_norm=args.freeze_norm,
            mix=build_mix(len(self.val_loader.dataset.classes), **alphas, seed=args.seed),
            amp=state.amp,
            clip_grad_norm=args.clip_grad_norm,
            accumulation_steps=self.accumulation_steps,
        )
        hooks = Hooks(
            log=log,
            before_batch=partial(self.before_batch, epoch),
            after_step=partial(self.after_step, epoch),
            record=lambda batch, metrics: self.record("train", epoch, self.step(epoch, batch + 1), metrics),
        )
        train_one_epoch(model, self.criterion, state.optimizer, self.train_loader, self.device, epoch, settings, hooks)

    def before_batch(self, epoch: int, batch: int) -> None:
        """Seed dropout by where the run is, so that a resumed run draws what an unbroken one does."""
        seed_everything(derive_seed(self.args.seed, epoch, batch, self.rank))

    def after_step(self, epoch: int, batches: int) -> None:
        """Average, save and stop, as they fall due, after `batches` of the epoch."""
        args, ema = self.args, self.state.ema
        step = self.step(0, batches)
        if ema and (step - 1) % args.model_ema_steps == 0:
            ema.update(self.model)
            if epoch < args.lr_warmup_epochs:
                ema.reset()
        stop = self.is_asked_to_stop()
        if stop or (args.checkpoint_freq and step % args.checkpoint_freq == 0):
            self.save(epoch, batches)
        if stop:
            self.wait_for_all()
            raise Stopped(f"stopped by SIGTERM after iter {batches - 1} of epoch {epoch}{self.go_on()}")

    def is_asked_to_stop(self) -> bool:
        """Whether SIGTERM has come to any process: all of them ask, and end at the same place."""
        return all_reduce_sum([self.stop.asked], self.device)[0] > 0

    def wait_for_all(self) -> None:
        """None may end before rank 0 has written, since the launcher then ends all."""
        all_reduce_sum([0], self.device)

    def end_epoch(self, epoch: int) -> None:
        """Evaluate, step the schedule, save; stop if SIGTERM came meanwhile.

        Raises UserError if the loss of an evaluation is NaN or infinite, once this epoch is saved, too.
        """
        state = self.state
        broadcast_buffers(self.model)
        losses = [self.evaluate(self.model, epoch, "Eval", "model")]
        if state.ema:
            broadcast_buffers(state.ema.module)
            losses.append(self.evaluate(state.ema.module, epoch, "Eval, EMA", "model_ema"))
        state.lr_scheduler.step()
        diverged = [loss for loss in losses if not math.isfinite(loss)]
        if diverged:
            self.keep_checkpoint(epoch)
        self.save(epoch + 1, 0)
        stop = self.is_asked_to_stop()
        if diverged:
            raise UserError(
                f"the loss is {diverged[0]} in the evaluation of epoch {epoch}: lower --lr, or check the images; "
                f"{self.checkpoint()} has the epoch, and {self.kept(epoch)} what was saved before it, if anything"
            )
        if stop and epoch + 1 < self.args.epochs:
            raise Stopped(f"stopped by SIGTERM after epoch {epoch}{self.go_on()}")

    def evaluate(self, model: nn.Layer, epoch: int, what: str, name: str) -> float:
        """Evaluate `model`, log it as `what`, and write its weights to `name`_EPOCH -> the loss."""
        try:
            metrics = evaluate(model, self.criterion, self.val_loader, self.device, self.is_asked_to_stop)
        except Stopped as stopped:
            self.save(epoch, len(self.train_loader))
            self.wait_for_all()
            raise Stopped(f"stopped by SIGTERM before the evaluation of epoch {epoch}{self.go_on()}") from stopped
        log(evaluation_line(epoch, metrics, what))
        self.record("eval" if name == "model" else "eval_ema", epoch, self.step(epoch + 1, 0), metrics)
        if self.rank == 0:
            save_weights(model, self.out / f"{name}_{epoch}{SUFFIX}")
        return metrics["loss"]

    def record(self, kind: str, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers to metrics.jsonl and to the viewer's log."""
        if self.rank == 0:
            self.metrics.write(kind, epoch=epoch, step=step, **metrics)
            if self.args.event_log:
                self.events.write({f"{kind}/{name}": value for name, value in metrics.items()}, step)

    def save(self, epoch: int, batch: int) -> None:
        """Write the checkpoint with which the run goes on at `batch` of `epoch`, after the record of what is behind."""
        if self.rank == 0:
            self.lock.check()
            self.metrics.sync()
            where = {"epoch": epoch, "batch": batch, "world_size": self.world_size}
            save_checkpoint(self.checkpoint(), self.state, **where, data=self.data, args=vars(self.args))

    def keep_checkpoint(self, epoch: int) -> None:
        """Copy the newest checkpoint, if there is one, to where that of `epoch` does not replace it."""
        if self.rank == 0 and self.checkpoint().exists():
            with atomic_path(self.kept(epoch)) as temporary:
                shutil.copyfile(self.checkpoint(), temporary)

    def kept(self, epoch: int) -> Path:
        return self.out / f"checkpoint_before_epoch_{epoch}{SUFFIX}"

    def checkpoint(self) -> Path:
        return self.out / f"checkpoint{SUFFIX}"

    def go_on(self) -> str:
        return f"; go on with --resume {self.checkpoint()}"
