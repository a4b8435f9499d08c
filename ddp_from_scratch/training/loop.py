"""Trains a classifier: `backward()` in `Trainer._backward` makes gradients ready."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

import ddp_from_scratch as ddp
from ddp_from_scratch import PeerError, StragglerReport, UsageError, World
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.compression import Compression
from ddp_from_scratch.training.coordination import (
    LossWatch,
    Stopped,
    gather_objects,
    highest,
    open_dataset,
    place_of,
    prepare_process,
    raise_on_all_ranks,
    seed_generators,
)
from ddp_from_scratch.training.datasets import (
    ImageData,
    Sample,
    StepSampler,
    make_loader,
    most_test_batches,
)
from ddp_from_scratch.training.evaluation import accuracy
from ddp_from_scratch.training.models import autocast, make_model
from ddp_from_scratch.training.optimizers import hidden_matrices, make_optimizer
from ddp_from_scratch.training.report import MetricsWriter, Report, ranks_text
from ddp_from_scratch.training.settings import Settings


class Trainer:
    """A training run on this rank: epochs of steps, each with an evaluation and a checkpoint.

    The constructor makes the data, the model, the Reducer and the optimizer, and restores them from
    a checkpoint. `run` trains to the end.

    With --elastic the process is alone in the constructor. It meets the others in `run`, and again
    whenever a rank is lost (`_on_regroup`). `ddp.elastic` then gives all ranks the parameters, the
    optimizer's state and the position (`state_dict`) of the rank that is ahead.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings = settings
        self.world: World = world
        self.report: Report = Report(is_rank_0=world.rank == 0, quiet=settings.quiet)
        group = prepare_process(settings, world, {"the command": "train"})
        # For CPU tensors. None is the default group, which --elastic replaces.
        self.group: dist.ProcessGroup | None = group if world.backend == "nccl" else None
        self.images: ImageData = open_dataset(settings.dataset, settings, world, self.group)
        # Open until `run` ends: the timeline, and the lock of the checkpoints' folder, since
        # another run would remove this one's.
        self.until_end: ExitStack = ExitStack()
        self.writes: bool = False
        self.epoch: int = 0
        self.step: int = 0
        self.global_step: int = 0
        with raise_on_all_ranks(self.group):
            self._make_loaders()
            self.model_spec: dict[str, Any] = self.images.model_spec(settings.model)
            # Built in the same way on every rank, then made equal to rank 0's.
            self.model: torch.nn.Module = make_model(**self.model_spec).to(world.device)
            if settings.sync_batch_norm:
                ddp.convert_sync_batchnorm(self.model)
                if not any(isinstance(layer, ddp.SyncBatchNorm) for layer in self.model.modules()):
                    raise UsageError(f"--sync-batch-norm: {settings.model} has no batch norm")
            if settings.optimizer == "muon":
                hidden_matrices(self.model, settings.model)
            # Without the agent that replaces lost ranks, --elastic changes nothing.
            elastic = settings.elastic and "DDP_MEMBER" in os.environ
            if not elastic:
                self._open_outputs(settings.resume)
        state, compressed = (None, None) if elastic else self._begin()
        self._make_reducer_and_optimizer(state)
        # This epoch's sums, as in `_count`: of this rank, or with --elastic of all ranks, since a
        # lost rank cannot be asked for its own.
        self.totals: torch.Tensor = torch.zeros(3, dtype=torch.float64, device=world.device)
        self.losses: LossWatch = LossWatch(world.rank, world.device)
        self.stop: ddp.StopSignal = ddp.StopSignal()
        self.saved_as: Path | None = None
        self.images_per_second: float = 0.0
        self.test_accuracy: float = math.nan
        if state is not None:
            self._restore(state)
            # Last, because it needs the restored scaler's scale.
            self.compression.restore(compressed, self.world, self.scaler, self.group)
        if settings.virtual_ranks is not None:
            self.reducer.set_step(self.global_step, settings.seed)
        self._elastic = None
        self._exchange: Callable[..., Callable[[], list[int]]] = partial(highest, group=self.group)
        if elastic:
            self._elastic = ddp.elastic(
                world,
                self.reducer,
                self.optimizer,
                self.scaler,
                self,
                timeout=settings.timeout,
                on_regroup=self._on_regroup,
            )
            self._exchange = self._elastic.exchange

    def _make_loaders(self) -> None:
        """Makes the loaders of this rank's images."""
        images, settings, world = self.images, self.settings, self.world
        self.train: DataLoader[Sample] = make_loader(images.train, settings, world, train=True)
        self.test: DataLoader[Sample] = make_loader(images.test, settings, world, train=False)
        assert isinstance(self.train.sampler, StepSampler)
        self.sampler: StepSampler = self.train.sampler

    def _open_outputs(self, resume: str | None) -> None:
        """Opens the folders for checkpoints and metrics on rank 0, the only rank that writes."""
        folder = self.settings.checkpoint_dir
        self.writes = self.world.rank == 0
        if folder is not None and self.writes:
            self.until_end.enter_context(checkpoint.prepare_folder(folder, resume=resume))
        self.metrics: MetricsWriter = MetricsWriter(self.settings.log_dir if self.writes else None)

    def _make_reducer_and_optimizer(self, state: checkpoint.State | None) -> None:
        settings, world = self.settings, self.world
        self.reducer: ddp.Reducer = ddp.Reducer(
            self.model,
            bucket_cap_mb=settings.bucket_cap_mb,
            overlap=settings.overlap,
            shared_memory=settings.shared_memory,
            gradient_as_bucket_view=True,
            # Evaluation uses rank 0's running statistics on every rank.
            sync_buffers=True,
            check_every=settings.check_sync or None,
            stall_after=settings.stall_after if settings.stall_after < math.inf else None,
            ready_order=None if state is None else state["ready_order"],
            virtual_ranks=settings.virtual_ranks,
            balance=settings.balance,
            recheck_every=settings.recheck,
        )
        self.compression: Compression = Compression(settings, self.model, self.reducer, self.report)
        with raise_on_all_ranks(self.group):
            self.optimizer: Any = make_optimizer(settings, self.model, self.reducer)
        scales = settings.precision == "fp16"
        plain = settings.virtual_ranks is None and settings.compress is None and not scales
        self.steps_in_backward: bool = settings.shard != "none" and plain
        if settings.stragglers is not None:
            self.reducer.watch_stragglers(settings.stragglers, self._report_stragglers)
        recording = settings.timeline and ddp.timeline(self.reducer, settings.timeline)
        self._timeline = self.until_end.enter_context(recording or nullcontext())
        # The scaler checks the averages, so an overflow on one rank makes all skip the step.
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler(world.device.type, enabled=scales)

    # The run --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Trains, and prints the result; returns 0, or the signal that ended all ranks early."""
        with self.until_end:
            if self._elastic is not None:
                # Meets the others. Until then a signal ends the process: there is nothing to save.
                self._elastic.repeat(lambda: None)
            began = time.monotonic()
            with self.stop:
                train = self._train
                number = train() if self._elastic is None else self._elastic.repeat(train)
        if number:
            return number
        seconds, settings = time.monotonic() - began, self.settings
        self.metrics.close()
        self.report.line(
            f"{settings.backend}, {ranks_text(self.world.world_size, settings.virtual_ranks)}, "
            f"global batch {self.sampler.global_batch_size}, {settings.model}, {seconds:.1f} s"
        )
        if settings.recheck is not None:
            self.report.line(f"rechecked {self.reducer.rechecked_steps} steps, all without a fault")
        if self.saved_as is not None:
            self.report.line(f"checkpoint {self.saved_as}")
        if settings.log_dir is not None:
            self.report.line(f"metrics {settings.log_dir}")
        self.report.result(f"{settings.dataset} test accuracy {self.test_accuracy:.4f}")
        return 0

    def _train(self) -> int:
        """Trains to the end; returns the signal that stopped the run, or 0."""
        number = 0
        try:
            self._train_epochs()
        except Stopped as stopped:
            number = stopped.number
        self._print_timeline()
        if number:
            self._check_losses()
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

    def _train_epochs(self) -> None:
        self.test_accuracy = math.nan
        in_later_group = self._elastic is not None and self._elastic.generation > 1
        if in_later_group and self.epoch and not self.step:
            # A rank may have been lost while the last checkpoint was written.
            self._save()
        while self.epoch < self.settings.epochs:
            self._train_epoch()
            self._check_losses()
            self._end_epoch()
        if math.isnan(self.test_accuracy):  # resumed after the last epoch
            self._evaluate()

    def _train_epoch(self) -> None:
        self.model.train()
        first, began = self.step, time.monotonic()
        batches = self._load_from_here()
        title = f"epoch {self.epoch + 1}/{self.settings.epochs}"
        for _ in self.report.progress(range(first, self.sampler.steps_per_epoch), title):
            # Overlaps with the step, so it has the losses of earlier steps only.
            answer = self._exchange(self.stop.received, self.losses.known())
            if self.settings.balance and not self.sampler.is_for(
                self.step, self.reducer.virtual_rank_range
            ):
                batches = self._load_from_here()
            self._step(batches)
            self._report_regrouping()
            self._end_early(*answer())
        if self.world.device.type == "cuda":
            torch.accelerator.synchronize(self.world.device)
        images = (self.step - first) * self.sampler.global_batch_size
        self.images_per_second = images / (time.monotonic() - began)

    def _load_from_here(self) -> Iterator[Any]:
        """Starts to load this rank's batches, from the next step to the end of the epoch."""
        if self.settings.virtual_ranks is None:
            self.sampler.set_epoch(self.epoch, self.step)
        else:
            # After a loss this may be a part of a step, which other ranks have begun.
            now = self.reducer.virtual_rank_range
            later = now if self.settings.balance else None
            self.sampler.set_epoch(self.epoch, self.step, now, later)
        return iter(self.train)

    def _step(self, batches: Iterator[Any]) -> None:
        settings = self.settings
        per_epoch, world_size = self.sampler.steps_per_epoch, self.world.world_size
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(self.global_step, per_epoch, world_size)
        self.optimizer.zero_grad()
        if settings.virtual_ranks is None:
            totals = self._backward(batches)
        else:
            own = self.reducer.virtual_rank_range

            def compute(virtual_rank: int) -> torch.Tensor:
                if virtual_rank in own:
                    return self._backward(batches)
                return self._backward(self._load(virtual_rank))  # repeated for --recheck

            of_each = self.reducer.run_virtual_ranks(compute)
            totals = torch.stack(of_each).sum(0)
        if self._elastic is not None:
            ddp.wait(dist.all_reduce(totals, async_op=True))
        # Muon's step communicates, but before it changes anything. Nothing communicates after that,
        # so a step that a lost rank aborts changes nothing.
        if not self.steps_in_backward:
            self.scaler.step(self.optimizer)
        self.totals.add_(totals)
        self.compression.update(self.scaler)
        self.step += 1
        self.global_step += 1
        self._note_progress()

    def _load(self, virtual_rank: int) -> Iterator[Any]:
        """Loads the batches of another rank's virtual rank in the step under way."""
        images = self.sampler.images_of(self.step, virtual_rank)
        size = self.settings.rank_batch_size(self.world.world_size)
        samples = [self.images.train[image] for image in images]
        return (default_collate(samples[i : i + size]) for i in range(0, len(samples), size))

    def _backward(self, batches: Iterator[Any]) -> torch.Tensor:
        """Runs `accumulate` batches of this rank, or of one virtual rank; returns their count."""
        settings, device = self.settings, self.world.device
        totals = torch.zeros_like(self.totals)
        for remaining in reversed(range(settings.accumulate)):
            images, labels = (t.to(device, non_blocking=True) for t in next(batches))
            # Only the last backward pass communicates: .grad then holds the sum of all passes.
            with self.reducer.no_sync() if remaining else nullcontext():
                with autocast(device, settings.precision):
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

    def _check_losses(self) -> None:
        """Raises on all ranks if a loss was not finite, also in the last step. Collective."""
        self._end_early(*highest(0, self.losses.settled(), group=self.group)())

    def _end_early(self, number: int, not_finite: int) -> None:
        """Raises if a rank has received a signal, or has a loss that is not finite."""
        if not_finite:
            self.metrics.close()
            # All ranks raise in the same step, so only rank 0 reports.
            error = UsageError if self.world.rank == 0 else PeerError
            raise error(
                f"the loss is not finite {place_of(not_finite, self.sampler.steps_per_epoch)}: a "
                f"smaller --lr may help; --resume auto continues from the last checkpoint"
            )
        if number:
            raise Stopped(number)

    # The end of an epoch --------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """Evaluates, reports and saves."""
        loss, correct, count = self._totals_of_all().tolist()
        loss, train_accuracy = loss / count, correct / count
        self._evaluate()  # if a signal stops it, the position stays: a resumed run repeats it
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
        self.epoch, self.step = self.epoch + 1, 0
        self.totals.zero_()
        self._note_progress()
        self._save()

    def _totals_of_all(self) -> torch.Tensor:
        """Returns the sum of all ranks' totals. Collective."""
        # A copy, because later steps need this rank's own.
        totals = self.totals.clone()
        if self._elastic is None:
            dist.all_reduce(totals)
        return totals

    def _evaluate(self) -> None:
        """Sets `test_accuracy`."""
        precision, batches = self.settings.precision, self._test_batches()
        self.test_accuracy = accuracy(self.model, batches, self.world, precision)

    def _test_batches(self) -> Iterator[Any]:
        """Yields this rank's test batches; after a signal every rank raises at the same one."""
        batches = iter(self.test)
        for _ in range(most_test_batches(self.test, self.world)):
            answer = highest(self.stop.received, 0, group=self.group)
            if (batch := next(batches, None)) is not None:
                yield batch
            self._end_early(*answer())

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

    def _report_regrouping(self) -> None:
        """Reports the first step in another group."""
        if self._elastic is None or self._elastic.regrouping is None:
            return
        (left, met, kept), self._elastic.regrouping = self._elastic.regrouping, None
        ranks, grouped, repeated = self.world.world_size, met - left, time.monotonic() - met
        of = f"{kept} of its {self.reducer.virtual_rank_count} virtual ranks were kept"
        self.report.line(
            f"continuing with {ranks} ranks in epoch {self.epoch + 1}, step {self.step}: "
            f"new group after {1e3 * grouped:.0f} ms, step completed "
            f"{1e3 * repeated:.0f} ms later{f' ({of})' if kept else ''}"
        )
        seconds = {"group_seconds": grouped, "step_seconds": repeated}
        self.metrics.log(self.global_step, ranks=ranks, kept_virtual_ranks=kept, **seconds)

    def _report_stragglers(self, found: StragglerReport) -> None:
        self.report.line(str(found))
        late = {"straggler_rank": found.rank, "straggler_ms": found.late_ms}
        # Called in the last backward pass of a step, before the step counts.
        self.metrics.log(
            self.global_step + 1,
            images_per_second=1e3 * self.sampler.global_batch_size / max(found.step_ms, 1e-3),
            step_ms=found.step_ms,
            **{f"{phase}_ms": ms for phase, ms in found.others_ms.items()},
            exposed_ms=found.exposed_ms,
            averaged_bytes=sum(self.reducer.stats().bucket_bytes),
            **(late if found.is_late else {}),
        )

    # Checkpoints ----------------------------------------------------------------------------------

    def _save(self) -> None:
        """Writes a checkpoint if one is asked for. Collective."""
        if (folder := self.settings.checkpoint_dir) is None:
            return
        # Gathered first: inside `raise_on_all_ranks` rank 0 works alone.
        generators: list[Any] = []
        if self.settings.virtual_ranks is None:  # virtual ranks are seeded in each step
            generators = gather_objects(checkpoint.rng_state(self.world.device), self.group)
        compressed = self.compression.state_of_all(self.world, self.scaler, self.group)
        totals = self._totals_of_all()
        of_all = {"rng": generators, "compression": compressed, "totals": totals}
        of_optimizer = self.optimizer.state_dict()  # collective with --shard world
        with raise_on_all_ranks(self.group):
            if self.world.rank == 0:
                self.saved_as = checkpoint.save(folder, self._state(of_optimizer) | of_all)

    def _state(self, of_optimizer: dict[str, Any]) -> checkpoint.State:
        """Returns the part of a checkpoint that is the same on every rank."""
        batch = self.sampler.global_batch_size
        return {
            "model": self.model.state_dict(),
            "model_spec": self.model_spec,
            "optimizer": of_optimizer,
            "scaler": self.scaler.state_dict(),
            "ready_order": self.reducer.ready_order,
            "epoch": self.epoch,
            "step": self.step,
            "images": self.step * batch,  # of this epoch's permutation
            "settings": self.settings.as_saved(torch.get_num_threads()),
            "world_size": self.world.world_size,
            "global_batch_size": batch,
        }

    def _restore(self, state: checkpoint.State) -> None:
        if self.settings.keeps_threads:
            torch.set_num_threads(state["settings"]["threads"])
        self.model.load_state_dict(state["model"])
        # Momentum and weight decay come from the settings, like all else.
        groups = {"param_groups": self.optimizer.state_dict()["param_groups"]}
        self.optimizer.load_state_dict(state["optimizer"] | groups)
        if state["scaler"]:  # empty if the precision was another
            self.scaler.load_state_dict(state["scaler"])
        self.epoch, per_epoch = state["epoch"], self.sampler.steps_per_epoch
        # If the global batch size has changed, images that do not fill a batch count as unseen.
        self.step = min(state["images"] // self.sampler.global_batch_size, per_epoch)
        self.global_step = self.epoch * per_epoch + self.step
        # The saved totals are those of all ranks: restored on one rank, their sum stays right.
        if self.world.rank == 0 and self.step == state["step"]:
            self.totals.copy_(state["totals"])
        if self.world.rank < len(state["rng"]):
            checkpoint.set_rng_state(state["rng"][self.world.rank], self.world.device)

    def _begin(self) -> tuple[checkpoint.State | None, checkpoint.State | None]:
        """Returns the state to start from or None, and its "compression" on rank 0. Collective."""
        ddp.broadcast_parameters(self.model)
        # From here on each rank draws its own random numbers: the models are equal by now.
        if self.settings.virtual_ranks is None:
            seed_generators(self.settings.seed + self.world.rank)
        state = self._find_checkpoint()
        # Kept on rank 0: it is as large as the gradients, and no rank needs another's.
        compressed = None if state is None else state.pop("compression", None)
        return ddp.broadcast_state(state, process_group=self.group), compressed

    def _find_checkpoint(self) -> checkpoint.State | None:
        """Returns the checkpoint to continue from, if any, on rank 0; else None. Collective."""
        settings, state = self.settings, None
        with raise_on_all_ranks(self.group):
            if self.world.rank == 0:
                spec, model = self.model_spec, self.model
                state = checkpoint.find_checkpoint(settings, spec, model, self.report)
        if state is not None:
            changes = settings.changes_since(state["settings"], torch.get_num_threads())
            now = {} if settings.virtual_ranks else {"world_size": self.world.world_size}
            now["global_batch_size"] = self.sampler.global_batch_size
            changes += [f"{k} {state[k]} -> {v}" for k, v in now.items() if state[k] != v]
            if changes:
                self.report.warning(f"not as in the checkpoint: {', '.join(changes)}")
        return state

    # With --elastic -------------------------------------------------------------------------------

    def _on_regroup(self, has_state: bool) -> None:
        """Takes this rank's place in another group, in which no rank may have a state yet."""
        assert self._elastic is not None, "which calls this"
        self.world = self._elastic.world
        self.report.is_rank_0 = self.world.rank == 0
        self.losses = LossWatch(self.world.rank, self.world.device)
        with raise_on_all_ranks(self.group):
            self._make_loaders()
            if not self.writes:
                # A rank that takes over continues with the lost rank's checkpoints.
                self._open_outputs("auto" if has_state else self.settings.resume)
        if not has_state and (state := self._find_checkpoint()) is not None:
            self._restore(state)
            self.compression.restore(state.get("compression"), self.world, self.scaler, self.group)
            self._note_progress()

    def _note_progress(self) -> None:
        if self._elastic is not None:
            self._elastic.step = self.global_step + self.epoch
            self._elastic.epochs = self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the run, for a rank that is behind or joins."""
        position = {"epoch": self.epoch, "step": self.step, "global_step": self.global_step}
        return position | {"totals": self.totals, "threads": torch.get_num_threads()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over another rank's position."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.global_step = state["global_step"]
        torch.set_num_threads(state["threads"])
        self.totals.copy_(state["totals"])


@torch.no_grad()
def _count(loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of losses, correct predictions and images; float64, on the device."""
    correct = (outputs.argmax(1) == labels).sum()
    count = torch.full_like(correct, len(labels))
    # Multiples of 2**-20 add up exactly, up to 2**33, whichever rank has which virtual ranks.
    total = (loss.double() * len(labels) * 2**20).round() / 2**20
    return torch.stack([total, correct.double(), count.double()])
