"""Compresses gradients (`--compress`), and saves the state of the compression."""

from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import comm_hooks
from ddp_from_scratch.options.power_sgd import PowerSGDState, power_sgd_hook
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.training.coordination import of_rank_0
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings

_HOOKS = {"bf16": comm_hooks.bf16_compress_hook, "fp16": comm_hooks.fp16_compress_hook}


class Compression:
    """Registers the comm hook that `--compress` names; does nothing without the option.

    Only PowerSGD has a state, each rank's error; it goes to and from checkpoints over `group`.
    """

    def __init__(
        self, settings: Settings, reducer: Reducer, group: dist.ProcessGroup | None
    ) -> None:
        self._reducer, self._group = reducer, group
        self._power_sgd: PowerSGDState | None = None
        self._loss_scale = 1.0  # that of PowerSGD's state
        if settings.compress in _HOOKS:
            reducer.register_comm_hook(None, _HOOKS[settings.compress])
        elif settings.compress == "powersgd":
            assert settings.powersgd_rank is not None, "Settings has a default"
            self._power_sgd = PowerSGDState(settings.powersgd_rank)
            reducer.register_comm_hook(self._power_sgd, power_sgd_hook)

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Rescales PowerSGD's state to the loss scale of the next gradients."""
        if self._power_sgd is None:
            return
        scale = scaler.get_scale()  # 1 if the scaler is disabled
        if scale != self._loss_scale:
            # The factor is a power of two, so rescaling is exact.
            self._power_sgd.rescale(scale / self._loss_scale)
            self._loss_scale = scale

    def state(self) -> dict[str, Any] | None:
        """Gathers all ranks' state on rank 0, for a checkpoint; None elsewhere. Collective."""
        if self._power_sgd is None:
            return None
        # Each rank's errors are needed: the bits of a resumed run depend on them.
        state = self._power_sgd.state_dict(self._reducer.module)
        mine = {name: error.cpu() for name, error in state["errors"].items()}
        first = dist.get_rank(self._group) == 0
        everyone: list[Any] | None = [None] * dist.get_world_size(self._group) if first else None
        dist.gather_object(mine, everyone, group_dst=0, group=self._group)
        return state | {"errors": everyone, "loss_scale": self._loss_scale} if first else None

    def restore(
        self, saved: dict[str, Any] | None, scaler: torch.amp.GradScaler, report: Report
    ) -> None:
        """Continues from `saved`, which only rank 0 has; warns if it cannot. Collective."""
        if self._power_sgd is None:
            if saved is not None:
                report.warning("what PowerSGD left out of earlier averages is dropped")
            return
        shared = of_rank_0(saved and saved | {"errors": None}, self._group)
        if shared is None:
            return
        errors: list[dict[str, torch.Tensor]] | None = None
        if saved is not None:
            errors, world_size = saved["errors"], dist.get_world_size(self._group)
            if len(errors) != world_size:
                # Averages depend only on the mean.
                report.warning(
                    "every rank begins with the mean of what PowerSGD left out on the "
                    f"{len(errors)} ranks before"
                )
                mean = {n: torch.stack([e[n] for e in errors]).mean(0) for n in errors[0]}
                errors = [mean] * world_size
        # Each rank gets only its own errors: all of them are as large as all ranks' gradients.
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, errors, 0, self._group)
        self._power_sgd.load_state_dict(self._reducer.module, shared | {"errors": mine[0]})
        self._loss_scale = shared["loss_scale"]
        self.follow(scaler)
