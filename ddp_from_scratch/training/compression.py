"""Compresses gradients as `--compress` says, and keeps the errors in checkpoints."""

from typing import Any

import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch import World
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings

_HOOKS: dict[str, Any] = {
    "bf16": ddp.comm_hooks.bf16_compress_hook,
    "fp16": ddp.comm_hooks.fp16_compress_hook,
    "int8": ddp.comm_hooks.int8_blockwise,
    "powersgd": ddp.power_sgd.power_sgd_hook,
}


class Compression:
    """The comm hook of a run; without `--compress` it does nothing.

    Attributes:
        state: the hook's, with this rank's errors; None if it keeps none.
    """

    def __init__(
        self, settings: Settings, model: torch.nn.Module, reducer: ddp.Reducer, report: Report
    ) -> None:
        self._kind, self._model, self._report = settings.compress, model, report
        self.state: ddp.power_sgd.PowerSGDState | ddp.comm_hooks.Int8State | None = None
        if self._kind == "powersgd":
            assert settings.powersgd_rank is not None, "Settings has a default"
            self.state = ddp.power_sgd.PowerSGDState(settings.powersgd_rank)
        elif self._kind == "int8":
            self.state = ddp.comm_hooks.Int8State()
        if self._kind is not None:
            reducer.register_comm_hook(self.state, _HOOKS[self._kind])

    def update(self, scaler: torch.amp.GradScaler) -> None:
        """Updates the scaler after a step; the errors follow its scale."""
        if self.state is None:
            scaler.update()
            return
        before = scaler.get_scale()
        scaler.update()
        if (scale := scaler.get_scale()) != before:
            # The next gradients have the new scale. The factor is a power of two, so it is exact.
            self.state.rescale(scale / before)

    def state_of_all(
        self, world: World, scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None
    ) -> checkpoint.State | None:
        """Gathers all ranks' state on rank 0; None elsewhere. Collective."""
        if self.state is None:
            return None
        # Each rank's errors are needed: the bits of a resumed run depend on them.
        state = self.state.state_dict(self._model)
        mine = {name: error.cpu() for name, error in state["errors"].items()}
        first = world.rank == 0
        everyone: list[Any] | None = [None] * world.world_size if first else None
        dist.gather_object(mine, everyone, group_dst=0, group=group)
        shared = {"kind": self._kind, "errors": everyone, "loss_scale": scaler.get_scale()}
        return state | shared if first else None

    def restore(
        self,
        saved: checkpoint.State | None,
        world: World,
        scaler: torch.amp.GradScaler,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Continues from `saved`, which only rank 0 has; warns if it cannot. Collective."""
        of_each: list[Any] = [None] * world.world_size
        if saved is not None:
            of_each = self._share_out(saved, world.world_size)
        if self.state is None:
            return
        # Each rank gets only its own errors: all of them are as large as all ranks' gradients.
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, of_each, 0, group)
        if mine[0] is not None:
            self.state.load_state_dict(self._model, mine[0])
            self.state.rescale(scaler.get_scale() / mine[0]["loss_scale"])

    def _share_out(self, saved: checkpoint.State, world_size: int) -> list[Any]:
        """Returns each rank's state; None where it starts without errors."""
        nothing, errors = [None] * world_size, saved["errors"]
        kind = saved.get("kind", "powersgd")  # earlier versions kept no other errors
        name = {"powersgd": "PowerSGD", "int8": "int8"}[kind]
        if kind != self._kind:
            self._report.warning(f"{name}'s error feedback is reset")
            return nothing
        if len(errors) != world_size:
            if kind == "int8":
                # They belong to the parts of buckets that a rank sends.
                self._report.warning(
                    f"int8's error feedback is reset: the checkpoint has that of {len(errors)} "
                    f"ranks, this run {world_size}"
                )
                return nothing
            # Averages depend only on the mean.
            self._report.warning(
                f"every rank begins with the mean of the PowerSGD errors of {len(errors)} ranks"
            )
            mean = {n: torch.stack([e[n] for e in errors]).mean(0) for n in errors[0]}
            errors = [mean] * world_size
        return [saved | {"errors": of_one} for of_one in errors]
