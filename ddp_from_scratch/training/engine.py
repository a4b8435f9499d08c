"""Makes what a rank trains with (data, model, Reducer, optimizer); saves and restores it."""

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ddp_from_scratch as ddp
from ddp_from_scratch import StragglerReport, UsageError, World
from ddp_from_scratch.launch.rank_process import is_communication_error
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.coordination import (
    LossWatch,
    gather_objects,
    open_dataset,
    prepare_process,
    raise_on_all_ranks,
    seed_generators,
)
from ddp_from_scratch.training.datasets import ImageData, Sample, StepSampler, make_loader
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.report import MetricsWriter, Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.elastic import Membership, broadcast_state

_HOOKS = {"bf16": ddp.comm_hooks.bf16_compress_hook, "fp16": ddp.comm_hooks.fp16_compress_hook}


class Engine:
    """The state of a training run on this rank, and its position: epoch and step."""

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
            # With --elastic this process is alone until `_begin`.
            max_world_size = settings.virtual_ranks or 1
            self.membership: Membership = Membership(world, max_world_size, settings.timeout)
            if not self.membership.elastic:
                self._open_outputs()
        state, compressed = self._retry_rendezvous(self._begin)
        self._make_engine(state)
        # This epoch's sums, as in `_count`: of this rank, or with --elastic of all ranks, since a
        # lost rank cannot be asked for its own.
        self.totals: torch.Tensor = torch.zeros(3, dtype=torch.float64, device=world.device)
        self.losses: LossWatch = LossWatch(world.rank, world.device)
        self.saved_as: Path | None = None
        # When this rank left the last group and when it joined the next; None once reported.
        self.regrouped: tuple[float, float, int] | None = None
        self.images_per_second: float = 0.0
        if state is not None:
            self._restore(state)
            # Last, because it needs the restored scaler's scale.
            self._restore_power_sgd(compressed)
        if settings.virtual_ranks is not None:
            self.reducer.set_step(self.global_step, settings.seed)
        self.membership.note_state()

    def _begin(self) -> tuple[checkpoint.State | None, checkpoint.State | None]:
        """Returns the state to start from or None, and its "compression" on rank 0. Collective.

        A rank that joins a run gets another rank's state; otherwise it is that of a checkpoint.
        """
        if self.membership.elastic and (state := self._meet()) is not None:
            return state, None
        ddp.broadcast_parameters(self.model)
        settings, state, compressed = self.settings, None, None
        # From here on each rank draws its own random numbers: the models are equal by now.
        if settings.virtual_ranks is None:
            seed_generators(settings.seed + self.world.rank)
        with raise_on_all_ranks(self.group):
            if self.world.rank == 0:
                spec, model = self.model_spec, self.model
                state = checkpoint.find_checkpoint(settings, spec, model, self.report)
                # Kept on rank 0: it is as large as the gradients, and no rank needs another's.
                if state is not None:
                    compressed = state.pop("compression", None)
        state = broadcast_state(state, 0, self.group)
        if state is not None:
            changes = settings.changes_since(state["settings"])
            now = {} if settings.virtual_ranks else {"world_size": self.world.world_size}
            now["global_batch_size"] = self.sampler.global_batch_size
            changes += [f"{k} {state[k]} -> {v}" for k, v in now.items() if state[k] != v]
            if changes:
                self.report.warning(f"not as in the checkpoint: {', '.join(changes)}")
        return state, compressed

    def _make_loaders(self) -> None:
        """Makes the loaders of this rank's images."""
        images, settings, world = self.images, self.settings, self.world
        self.train: DataLoader[Sample] = make_loader(images.train, settings, world, train=True)
        self.test: DataLoader[Sample] = make_loader(images.test, settings, world, train=False)
        assert isinstance(self.train.sampler, StepSampler)
        self.sampler: StepSampler = self.train.sampler

    def _open_outputs(self) -> None:
        """Opens the folders for checkpoints and metrics on rank 0, the only rank that writes."""
        folder = self.settings.checkpoint_dir
        self.writes = self.world.rank == 0
        if folder is not None and self.writes:
            # A rank that takes over continues with the lost rank's checkpoints.
            resume = "auto" if self.membership.is_new_leader else self.settings.resume
            self.until_end.enter_context(checkpoint.prepare_folder(folder, resume=resume))
        self.metrics: MetricsWriter = MetricsWriter(self.settings.log_dir if self.writes else None)

    def _make_engine(self, state: checkpoint.State | None) -> None:
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
        )
        self.power_sgd: ddp.power_sgd.PowerSGDState | None = None
        if settings.compress == "powersgd":
            assert settings.powersgd_rank is not None, "Settings has a default"
            self.power_sgd = ddp.power_sgd.PowerSGDState(settings.powersgd_rank)
            self.reducer.register_comm_hook(self.power_sgd, ddp.power_sgd.power_sgd_hook)
        elif settings.compress is not None:
            self.reducer.register_comm_hook(None, _HOOKS[settings.compress])
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

    def _rejoin(self, error: Exception) -> None:
        """Leaves the group after the loss of a rank; reraises any other error."""
        if not self.membership.elastic or not is_communication_error(error):
            self.membership.note_failure(self.global_step + self.epoch, error)
            raise error
        self.membership.rejoin(error)

    def _retry_rendezvous(self, meet: Callable[[], Any]) -> Any:
        while True:
            try:
                return meet()
            except Exception as error:  # noqa: BLE001  # raised again where it ends the run
                self._rejoin(error)

    def _meet(self) -> checkpoint.State | None:
        """Opens the next generation's group with this rank in it. Collective.

        Returns the state of the rank that is ahead; None if all are equal or at the start.
        """
        meeting = self.membership.meet(self.global_step + self.epoch)
        self.world = self.membership.world
        self.report.is_rank_0 = self.world.rank == 0
        with raise_on_all_ranks(self.group):
            self._make_loaders()
            if not self.writes:
                self._open_outputs()
        if meeting.source is None or meeting.same_state:
            return None
        mine = None
        if self.world.rank == meeting.source:
            mine = self._state(self.optimizer.state_dict()) | {"rng": [], "totals": self.totals}
        found: checkpoint.State = broadcast_state(mine, meeting.source)
        return found

    def _save(self) -> None:
        """Writes a checkpoint if one is asked for. Collective."""
        if (folder := self.settings.checkpoint_dir) is None:
            return
        # Gathered first: inside `raise_on_all_ranks` rank 0 works alone.
        generators: list[Any] = []
        if self.settings.virtual_ranks is None:  # virtual ranks are seeded in each step
            generators = gather_objects(checkpoint.rng_state(self.world.device), self.group)
        compressed, totals = self._power_sgd_of_all(), self._totals_of_all()
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
            "settings": self.settings.as_saved(),
            "world_size": self.world.world_size,
            "global_batch_size": batch,
        }

    def _restore(self, state: checkpoint.State) -> None:
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
        if (self.world.rank == 0 or self.membership.elastic) and self.step == state["step"]:
            self.totals.copy_(state["totals"])
        if self.world.rank < len(state["rng"]):
            checkpoint.set_rng_state(state["rng"][self.world.rank], self.world.device)

    def _power_sgd_of_all(self) -> checkpoint.State | None:
        """Gathers all ranks' state of PowerSGD on rank 0; None elsewhere. Collective."""
        if self.power_sgd is None:
            return None
        # Each rank's errors are needed: the bits of a resumed run depend on them.
        state = self.power_sgd.state_dict(self.model)
        mine = {name: error.cpu() for name, error in state["errors"].items()}
        first = self.world.rank == 0
        everyone: list[Any] | None = [None] * self.world.world_size if first else None
        dist.gather_object(mine, everyone, group_dst=0, group=self.group)
        shared = {"errors": everyone, "loss_scale": self.scaler.get_scale()}
        return state | shared if first else None

    def _restore_power_sgd(self, saved: checkpoint.State | None) -> None:
        """Continues from `saved`, which only rank 0 has; warns if it cannot. Collective."""
        if self.power_sgd is None:
            if saved is not None:
                self.report.warning("PowerSGD's error feedback is reset")
            return
        of_each: list[Any] = [None] * self.world.world_size
        if saved is not None:
            errors = saved["errors"]
            if len(errors) != len(of_each):
                # Averages depend only on the mean.
                self.report.warning(
                    f"every rank begins with the mean of the PowerSGD errors of {len(errors)} ranks"
                )
                mean = {n: torch.stack([e[n] for e in errors]).mean(0) for n in errors[0]}
                errors = [mean] * len(of_each)
            of_each = [saved | {"errors": of_one} for of_one in errors]
        # Each rank gets only its own errors: all of them are as large as all ranks' gradients.
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, of_each, 0, self.group)
        if mine[0] is not None:
            self.power_sgd.load_state_dict(self.model, mine[0])
            self.power_sgd.rescale(self.scaler.get_scale() / mine[0]["loss_scale"])

    def _totals_of_all(self) -> torch.Tensor:
        """Returns the sum of all ranks' totals. Collective."""
        # A copy, because later steps need this rank's own.
        totals = self.totals.clone()
        if not self.membership.elastic:
            dist.all_reduce(totals)
        return totals


def make_optimizer(
    settings: Settings, model: torch.nn.Module, reducer: ddp.Reducer
) -> torch.optim.Optimizer:
    """Makes `--optimizer`. Its state is numbered in the order of the model's parameters."""
    rates: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    parameters, shard = list(model.parameters()), settings.shard
    if settings.optimizer == "adamw":
        return ddp.AdamW(parameters, reducer=reducer, shard=shard, **rates)
    assert settings.momentum is not None, "it has a default"
    if settings.optimizer == "sgd":
        momentum = settings.momentum
        return ddp.SGD(parameters, momentum=momentum, reducer=reducer, shard=shard, **rates)
    hidden = hidden_matrices(model, settings.model)
    # A group for each parameter, as two groups would number the state in another order.
    groups = [{"params": [p], "use_muon": id(p) in hidden} | rates for p in parameters]
    return ddp.Muon(
        groups, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw", reducer=reducer
    )


def hidden_matrices(model: torch.nn.Module, name: str) -> set[int]:
    """Returns the ids of all matrices but the output layer's; a UsageError if there are none."""
    found = {id(p) for p in [p for p in model.parameters() if p.ndim == 2][:-1]}
    if not found:
        raise UsageError(
            f"--optimizer muon steps matrices of hidden layers, and {name} has none: use adamw, or "
            f"a model that has some (mlp, vit_b_16)"
        )
    return found
