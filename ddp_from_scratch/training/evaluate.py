"""Accuracy of a model on a test set that is shared out over the ranks, each image once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.group import of_member
from ddp_from_scratch.sync.broadcast import broadcast_parameters
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.contents import check_fit
from ddp_from_scratch.training.coordination import (
    on_rank_zero,
    open_dataset,
    prepare_process,
    together,
)
from ddp_from_scratch.training.loaders import make_loader
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.waiting import wait
from ddp_from_scratch.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[Any], world: World, precision: str) -> float:
    """The share of right answers over all ranks' images. Collective: one all-reduce at the end.

    The model is the same on every rank, buffers included, and left in evaluation mode. The loader
    has this rank's images (float32, N x C x H x W) and labels (int64, N), and may be empty.
    """
    model.eval()
    # Summed on the device, and all-reduced once: ranks may have different numbers of batches.
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for images, labels in loader:
        labels = labels.to(world.device, non_blocking=True)
        with torch.autocast(world.device.type, DTYPES[precision], precision != "fp32"):
            outputs = model(images.to(world.device, non_blocking=True))
        totals[0] += (outputs.argmax(1) == labels).sum()
        totals[1] += len(labels)
    wait(of_member(dist.all_reduce(totals, async_op=True)))
    correct, count = totals.tolist()
    return float(correct / count)


def load_model(path: Path, world: World, group: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, on every rank, and the checkpoint's other contents. Collective.

    Rank 0 reads the file, so it need not be on every machine. A file that is no checkpoint, or does
    not fit its own model, is a UsageError on every rank.
    """

    def read() -> checkpoint.State:
        state = checkpoint.load(path)
        wrong = f"{path} does not fit its own model {state['model_spec']['name']}"
        try:
            # Without memory: a size in the file could ask for any amount.
            with torch.device("meta"):
                shell = make_model(**state["model_spec"])
            check_fit(state, shell)
        except UsageError as error:  # which is a ValueError, and has a reason of its own
            raise UsageError(f"{wrong}: {error}") from error
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # a size beyond all
            raise UsageError(
                f"{wrong}, it was written by another version of torchvision or of this program: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return state

    state = on_rank_zero(read, group)
    with together(group):
        model = make_model(**state["model_spec"])
        model.load_state_dict(state["model"])
    model.to(world.device)
    broadcast_parameters(model)
    return model, state


def test(settings: Settings, dataset: str | None, path: Path, world: World) -> None:
    """Prints the test accuracy of a saved model; without a dataset, on that of its training.

    Collective. Settings that concern training are not used. Raises a UsageError on every rank for a
    checkpoint that is not there, or images that the model was not made for.
    """
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
