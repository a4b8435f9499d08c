"""Trains a classifier: `backward()` in `Trainer._step` makes gradients ready. Tests one, too."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_from_scratch as ddp
from ddp_from_scratch import CommunicationError, PeerError, UsageError, World
from ddp_from_scratch.common.group import wait
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.coordination import (
    StopSignal,
    open_dataset,
    place_of,
    prepare_process,
    raise_on_all_ranks,
)
from ddp_from_scratch.training.datasets import make_loader, most_test_batches
from ddp_from_scratch.training.engine import Engine
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.elastic import broadcast_state

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer(Engine):
    """A training run on this rank: epochs of steps, each with an evaluation and a checkpoint."""

    def run(self) -> int:
        """Trains, and prints the result; returns 0, or the signal that ended all ranks early."""
        began = time.monotonic()
        with self.until_end, StopSignal(self.group) as stop:
            while True:
                try:
                    number = self._train(stop)
                    break
                except Exception as error:  # noqa: BLE001  # raised again where it ends the run
                    left = time.monotonic()
                    if self.membership.elastic:
                        # Unfinished collectives would hold the lost group's connections.
                        stop.drop()
                        self.reducer.abort_step()
                    self._rejoin(error)
                kept = self._retry_rendezvous(self._continue)
                self.regrouped = left, time.monotonic(), kept
        if number:
            return number
        seconds, settings = time.monotonic() - began, self.settings
        self.metrics.close()
        self.report.line(
            f"{settings.backend}, {self.world.world_size} ranks, global batch "
            f"{self.sampler.global_batch_size}, {settings.model}, {seconds:.1f} s"
        )
        if self.saved_as is not None:
            self.report.line(f"checkpoint {self.saved_as}")
        if settings.log_dir is not None:
            self.report.line(f"metrics {settings.log_dir}")
        self.report.result(f"{settings.dataset} test accuracy {self.test_accuracy:.4f}")
        return 0

    def _train(self, stop: StopSignal) -> int:
        """Trains to the end; returns the signal that stopped the run, or 0."""
        number = 0
        self.test_accuracy: float = math.nan
        if self.membership.changed and self.epoch and not self.step:
            # A rank may have been lost while the last checkpoint was written.
            self._save()
        while self.epoch < self.settings.epochs and not number:
            number = self._train_epoch(stop)
            # Exchange the last steps' losses before the checkpoint.
            stop.ask(self.losses.settled())
            number = self._answer(stop) or number
            if not number:
                number = self._end_epoch(stop)
        if not number and math.isnan(self.test_accuracy):  # resumed after the last epoch
            number = self._evaluate(stop)
        self._print_timeline()
        if number:
            self._save()
            saved = "nothing was saved (no --checkpoint-dir)"
            if self.saved_as is not None:
                saved = f"saved {self.saved_as}: --resume auto continues"
            place = f"in epoch {self.epoch + 1}, step {self.step}/{self.sampler.steps_per_epoch}"
            if self.epoch == self.settings.epochs:
                place = "after the last epoch"
            self.report.result(f"stopped {place}; {saved}")
            self.metrics.close()
            # No rank may exit before rank 0 has saved: the launcher may then end the others.
            dist.barrier(group=self.group)
        return number

    def _continue(self) -> int:
        """Meets the remaining ranks at the last step that any finished; returns `set_step`'s."""
        state = self._meet()
        if state is not None:
            self._restore(state)
        return self.reducer.set_step(self.global_step, self.settings.seed, keep=state is None)

    def _print_timeline(self) -> None:
        if self._timeline is None:
            return
        self._timeline.close()  # collective
        if self._timeline.record is None:
            self.report.warning("no timeline: too few steps")
            return
        self.report.line(f"\n{self._timeline.as_text(colour=self.report.colours)}\n")
        self.report.line(f"timeline {self._timeline.folder}/timeline.html")
        if not self._timeline.has_picture:
            self.report.line("no picture: that takes matplotlib (pip install matplotlib)")

    def _train_epoch(self, stop: StopSignal) -> int:
        """Trains to the end of the epoch; returns the signal that stopped it, or 0."""
        self.model.train()
        virtual = self.settings.virtual_ranks is not None
        self.sampler.set_epoch(
            self.epoch, self.step, self.reducer.virtual_rank_range if virtual else None
        )
        first, began = self.step, time.monotonic()
        batches = iter(self.train)
        title = f"epoch {self.epoch + 1}/{self.settings.epochs}"
        for _ in self.report.progress(range(first, self.sampler.steps_per_epoch), title):
            # Overlaps with the step, so it has the losses of earlier steps only.
            stop.ask(self.losses.known(), self.membership.is_over)
            self._step(batches)
            if self.regrouped is not None:
                # After the first step in the new group.
                (left, met, kept), self.regrouped = self.regrouped, None
                ranks, grouped, repeated = self.world.world_size, met - left, time.monotonic() - met
                of = f"{kept} of its {self.reducer.virtual_rank_count} virtual ranks were kept"
                self.report.line(
                    f"continuing with {ranks} ranks in epoch {self.epoch + 1}, step {self.step}: "
                    f"another group after {1e3 * grouped:.0f} ms, the step after "
                    f"{1e3 * repeated:.0f} ms{f' ({of})' if kept else ''}"
                )
                seconds = {"group_seconds": grouped, "step_seconds": repeated}
                self.metrics.log(self.global_step, ranks=ranks, kept_virtual_ranks=kept, **seconds)
            if number := self._answer(stop):
                return number
        if self.world.device.type == "cuda":
            torch.accelerator.synchronize(self.world.device)
        images = (self.step - first) * self.sampler.global_batch_size
        self.images_per_second: float = images / (time.monotonic() - began)
        return 0

    def _step(self, batches: Iterator[Any]) -> None:
        settings = self.settings
        per_epoch, world_size = self.sampler.steps_per_epoch, self.world.world_size
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(self.global_step, per_epoch, world_size)
        self.optimizer.zero_grad()
        if settings.virtual_ranks is None:
            totals = self._backward(batches)
        else:
            of_each = self.reducer.run_virtual_ranks(lambda _: self._backward(batches))
            totals = torch.stack(of_each).sum(0)
        if self.membership.elastic:
            wait(dist.all_reduce(totals, async_op=True))
        # Muon's step communicates, but before it changes anything. Nothing communicates after that,
        # so a step that a lost rank aborts changes nothing.
        if not self.steps_in_backward:
            self.scaler.step(self.optimizer)
        self.totals.add_(totals)
        before = self.scaler.get_scale() if self.power_sgd is not None else 1.0
        self.scaler.update()
        if self.power_sgd is not None and (scale := self.scaler.get_scale()) != before:
            # The next gradients have the new scale. The factor is a power of two, so it is exact.
            self.power_sgd.rescale(scale / before)
        self.step += 1
        self.global_step: int = self.global_step + 1

    def _backward(self, batches: Iterator[Any]) -> torch.Tensor:
        """Runs `accumulate` batches of this rank, or of one virtual rank; returns their count."""
        settings, device = self.settings, self.world.device
        dtype = _DTYPES[settings.precision]
        totals = torch.zeros_like(self.totals)
        for remaining in reversed(range(settings.accumulate)):
            images, labels = (t.to(device, non_blocking=True) for t in next(batches))
            # Only the last backward pass communicates: .grad then holds the sum of all passes.
            with self.reducer.no_sync() if remaining else nullcontext():
                with torch.autocast(device.type, dtype, dtype != torch.float32):
                    outputs = self.model(images)
                    loss = cross_entropy(outputs, labels)
                # Divided here, because gradients of several backward passes add up.
                part = loss / settings.accumulate
                if self.steps_in_backward and not remaining:
                    self.optimizer.backward_and_step(part)
                else:
                    self.scaler.scale(part).backward()
            totals += _count(loss, outputs, labels)
            self.losses.see(loss, self.global_step)
        return totals

    def _answer(self, stop: StopSignal) -> int:
        """Ends an exchange and acts on its loss; returns the number of the signal, or 0."""
        number, not_finite, is_over = stop.answer()
        if not_finite:
            self.metrics.close()
            # All ranks raise in the same step, so only rank 0 reports.
            error = UsageError if self.world.rank == 0 else PeerError
            raise error(
                f"the loss is not finite {place_of(not_finite, self.sampler.steps_per_epoch)}: a "
                f"smaller --lr may help; --resume auto continues from the last checkpoint"
            )
        if is_over and not number:
            raise CommunicationError("the membership has changed")
        return number

    def _end_epoch(self, stop: StopSignal) -> int:
        """Evaluates, reports and saves; returns the signal that stopped the evaluation, or 0."""
        loss, correct, count = self._totals_of_all().tolist()
        loss, train_accuracy = loss / count, correct / count
        if number := self._evaluate(stop):
            return number  # the position stays: a resumed run repeats the evaluation
        shown = f"{loss:.4f}" if loss < 1e6 else f"{loss:.3e}"
        self.report.line(
            f"epoch {self.epoch + 1:>3}/{self.settings.epochs}  loss {shown}  "
            f"train {train_accuracy:.2%}  test {self.test_accuracy:.2%}  "
            f"{self.images_per_second:,.0f} images/s"
        )
        self.metrics.log(
            self.global_step,
            epoch=self.epoch + 1,
            loss=loss,
            train_accuracy=train_accuracy,
            test_accuracy=self.test_accuracy,
            images_per_second=self.images_per_second,
            lr=self.optimizer.param_groups[0]["lr"],
        )
        if self.settings.check_sync is not None:
            checksum = ddp.check_sync(self.model, self.group, optimizers=[self.optimizer])
            ranks = self.world.world_size
            self.report.result(f"parameters {checksum}, bit-identical on {ranks} ranks")
        # Set before the checkpoint, from which a resumed run starts the next epoch.
        self.epoch: int = self.epoch + 1
        self.step: int = 0
        self.totals.zero_()
        self._save()
        return 0

    def _evaluate(self, stop: StopSignal) -> int:
        """Sets `test_accuracy`; returns the signal that stopped the evaluation early, or 0."""
        precision, batches = self.settings.precision, self._test_batches(stop)
        try:
            self.test_accuracy = accuracy(self.model, batches, self.world, precision)
        except _Stopped as stopped:
            return stopped.number
        return 0

    def _test_batches(self, stop: StopSignal) -> Iterator[Any]:
        """Yields this rank's test batches; after a signal every rank raises at the same one."""
        batches = iter(self.test)
        for _ in range(most_test_batches(self.test, self.world)):
            stop.ask(0)
            if (batch := next(batches, None)) is not None:
                yield batch
            if number := self._answer(stop):
                raise _Stopped(number)


class _Stopped(Exception):
    """An evaluation that a signal has stopped, on all ranks."""

    def __init__(self, number: int) -> None:
        self.number = number


@torch.no_grad()
def _count(loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of losses, correct predictions and images; float64, on the device."""
    correct = (outputs.argmax(1) == labels).sum()
    count = torch.full_like(correct, len(labels))
    # Multiples of 2**-20 add up exactly, up to 2**33, whichever rank has which virtual ranks.
    total = (loss.double() * len(labels) * 2**20).round() / 2**20
    return torch.stack([total, correct.double(), count.double()])


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Any], world: World, precision: str) -> float:
    """Returns the share of correct predictions over all ranks' images. Collective."""
    model.eval()  # and stays so
    # One all-reduce at the end, because ranks may have different numbers of batches.
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for images, labels in loader:
        labels = labels.to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, _DTYPES[precision], precision != "fp32"):
            outputs = model(images.to(world.device, non_blocking=True))
        totals[0] += (outputs.argmax(1) == labels).sum()
        totals[1] += len(labels)
    wait(dist.all_reduce(totals, async_op=True))
    correct, count = totals.tolist()
    return float(correct / count)


def load_model(path: Path, world: World, group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """Loads a checkpoint's model on every rank; also returns its other contents. Collective."""
    state = None
    with raise_on_all_ranks(group):
        if world.rank == 0:
            state = checkpoint.load(path)
    state = broadcast_state(state, 0, group)
    with raise_on_all_ranks(group):
        model = make_model(**state["model_spec"])
        checkpoint.check_model(state, model, path)
        model.load_state_dict(state["model"])
    model.to(world.device)
    ddp.broadcast_parameters(model)
    return model, state


def test(settings: Settings, dataset: str | None, path: Path, world: World) -> None:
    """Prints a saved model's test accuracy, by default on the dataset of its training."""
    must_match = {"the command": "test", "--dataset": dataset or "not given"}
    group = prepare_process(settings, world, must_match)
    model, state = load_model(path, world, group)
    name = dataset or state["settings"]["dataset"]
    data = open_dataset(name, settings, world, group)
    with raise_on_all_ranks(group):
        for what in ("channels", "image_size", "num_classes"):
            if getattr(data, what) != state["model_spec"][what]:
                raise UsageError(
                    f"{path} was trained on {state['settings']['dataset']} with {what} "
                    f"{state['model_spec'][what]}, but {name} has {getattr(data, what)}"
                )
        loader = make_loader(data.test, settings, world, train=False)
    share = accuracy(model, loader, world, settings.precision)
    report = Report(is_rank_0=world.rank == 0, quiet=settings.quiet)
    report.result(f"{name} test accuracy {share:.4f}")
