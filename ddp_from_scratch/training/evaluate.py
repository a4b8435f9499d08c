"""Computes a model's accuracy on a test set that the ranks share out, each image once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.errors import UsageError, one_line
from ddp_from_scratch.group import wait
from ddp_from_scratch.sync.broadcast import broadcast_parameters
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.contents import check_fit
from ddp_from_scratch.training.coordination import (
    of_rank_0,
    open_dataset,
    prepare_process,
    together,
)
from ddp_from_scratch.training.loaders import make_loader
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Any], world: World, precision: str) -> float:
    """Returns the share of correct predictions over all ranks' images. Collective."""
    model.eval()  # and stays so
    # One all-reduce at the end, because ranks may have different numbers of batches.
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for images, labels in loader:
        labels = labels.to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, DTYPES[precision], precision != "fp32"):
            outputs = model(images.to(world.device, non_blocking=True))
        totals[0] += (outputs.argmax(1) == labels).sum()
        totals[1] += len(labels)
    wait(dist.all_reduce(totals, async_op=True))
    correct, count = totals.tolist()
    return float(correct / count)


def load_model(path: Path, world: World, group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """Loads a checkpoint's model on every rank; also returns its other contents. Collective."""
    state = None
    with together(group):
        if world.rank == 0:
            state = checkpoint.load(path)
            try:
                # Allocate nothing: a size in the file could ask for any amount.
                with torch.device("meta"):
                    check_fit(state, make_model(**state["model_spec"]))
            except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
                name = state["model_spec"]["name"]
                raise UsageError(
                    f"{path} does not fit its own model {name}: {one_line(error)}"
                ) from error
    state = of_rank_0(state, group)
    with together(group):
        model = make_model(**state["model_spec"])
        model.load_state_dict(state["model"])
    model.to(world.device)
    broadcast_parameters(model)
    return model, state


def test(settings: Settings, dataset: str | None, path: Path, world: World) -> None:
    """Prints a saved model's test accuracy, by default on the dataset of its training."""
    asked = {"the command": "test", "--dataset": dataset or "not given"}
    group = prepare_process(settings, world, asked)
    model, state = load_model(path, world, group)
    name = dataset or state["settings"]["dataset"]
    data = open_dataset(name, settings, world, group)
    with together(group):
        for what in ("channels", "image_size", "num_classes"):
            if getattr(data, what) != state["model_spec"][what]:
                raise UsageError(
                    f"{path} was trained on {state['settings']['dataset']} with {what} "
                    f"{state['model_spec'][what]}, but {name} has {getattr(data, what)}"
                )
        loader = make_loader(data.test, settings, world, train=False)
    share = accuracy(model, loader, world, settings.precision)
    Report(speaks=world.rank == 0, quiet=settings.quiet).result(f"{name} test accuracy {share:.4f}")
