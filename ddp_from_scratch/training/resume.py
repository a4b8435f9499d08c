"""Reads the checkpoint that a run continues from, on rank 0, and passes it on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.contents import check_fit
from ddp_from_scratch.training.coordination import together
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings

T = TypeVar("T")
ModelSpec = dict[str, Any]


def on_rank_zero(read: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Calls `read` on rank 0; its result, or its UsageError, is that of every rank. Collective."""
    found: list[Any] = [None]
    with together(group):
        if dist.get_rank(group) == 0:
            found = [read()]
    dist.broadcast_object_list(found, group=group, device=torch.device("cpu"))
    value: T = found[0]
    return value


def checkpoint_of_all(
    settings: Settings,
    model_spec: ModelSpec,
    model: nn.Module,
    report: Report,
    group: dist.ProcessGroup | None,
) -> tuple[checkpoint.State | None, checkpoint.State | None]:
    """As `find_checkpoint`, for every rank; and the "compression" in it, on rank 0 alone."""
    compression: list[checkpoint.State | None] = [None]

    def read() -> checkpoint.State | None:
        state = find_checkpoint(settings, model_spec, model, report)
        # Not for all: it is as large as the gradients, for each rank, and no rank needs another's.
        if state is not None:
            compression[0] = state.pop("compression", None)
        return state

    return on_rank_zero(read, group), compression[0]


def find_checkpoint(
    settings: Settings, model_spec: ModelSpec, model: nn.Module, report: Report
) -> checkpoint.State | None:
    """The checkpoint to continue from; None where none is asked for, or `auto` finds none.

    Raises:
        UsageError: it cannot be read, holds another model, or does not fit into this one.
    """
    resume, folder = settings.resume, settings.checkpoint_dir
    if resume is None:
        return None
    if resume == "auto" and folder is not None:
        newest = checkpoint.load_newest(folder, torch.device("cpu"))
        if newest is None:
            report.line(f"no checkpoint in {folder} yet: starting anew")
            return None
        path, state, complaints = newest
        for complaint in complaints:
            report.warning(f"{complaint}; using {path.name} instead")  # the other was renamed
    else:
        path = Path(resume)
        state = checkpoint.load(path, torch.device("cpu"))
    if state["model_spec"] != model_spec:
        raise UsageError(
            f"{path} holds {_describe(state['model_spec'])}, this run trains "
            f"{_describe(model_spec)}: give the --model and --dataset it was made with"
        )
    try:
        check_fit(state, model)
    except UsageError as error:
        raise UsageError(f"{path} does not fit {_describe(model_spec)}: {error}") from error
    report.line(f"resuming from {path}")
    return state


def _describe(spec: ModelSpec) -> str:
    size = spec["image_size"]
    return f"{spec['name']} for {spec['num_classes']} classes of {spec['channels']}x{size}x{size}"
