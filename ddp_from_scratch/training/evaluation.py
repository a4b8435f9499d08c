"""Measures a model's accuracy over all ranks; `test` is the program behind `run.py test`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import UsageError, World
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.coordination import (
    open_dataset,
    prepare_process,
    raise_on_all_ranks,
)
from ddp_from_scratch.training.datasets import make_loader
from ddp_from_scratch.training.models import autocast, make_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Any], world: World, precision: str) -> float:
    """Returns the share of correct predictions over all ranks' images. Collective."""
    model.eval()  # and stays so
    # One all-reduce at the end, because ranks may have different numbers of batches.
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for images, labels in loader:
        labels = labels.to(world.device, non_blocking=True)
        with autocast(world.device, precision):
            outputs = model(images.to(world.device, non_blocking=True))
        totals[0] += (outputs.argmax(1) == labels).sum()
        totals[1] += len(labels)
    ddp.wait(dist.all_reduce(totals, async_op=True))
    correct, count = totals.tolist()
    return float(correct / count)


def load_model(path: Path, world: World, group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """Loads a checkpoint's model on every rank; also returns its other contents. Collective."""
    state = None
    with raise_on_all_ranks(group):
        if world.rank == 0:
            state = checkpoint.load(path)
    state = ddp.broadcast_state(state, process_group=group)
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
