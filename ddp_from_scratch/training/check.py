"""Compares the ranks before a long run, for `run.py --check`: all repeat rank 0's first batch."""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import ddp_from_scratch as ddp
from ddp_from_scratch import World
from ddp_from_scratch.training.coordination import (
    open_dataset,
    prepare_process,
    raise_on_all_ranks,
)
from ddp_from_scratch.training.datasets import StepSampler
from ddp_from_scratch.training.models import autocast, make_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings

# A rank that takes so many times as long as the fastest one is marked.
_SLOW = 1.2


def check(settings: Settings, world: World) -> int:
    """Prints whether all ranks compute the same bits, and how fast; returns the exit code."""
    assert settings.check is not None, "the option is given"
    group = prepare_process(settings, world, {"the command": "train --check"})
    data = open_dataset(settings.dataset, settings, world, group)
    with raise_on_all_ranks(group):
        sampler = StepSampler(len(data.train), settings, world)  # type: ignore[arg-type]
        samples = [data.train[image] for image in sampler.images_of(0, 0)]
        model = make_model(**data.model_spec(settings.model)).to(world.device)
    images, labels = (tensor.to(world.device) for tensor in default_collate(samples))
    size = settings.rank_batch_size(world.world_size)
    batches = list(zip(images.split(size), labels.split(size), strict=True))
    report = Report(is_rank_0=world.rank == 0, quiet=settings.quiet)
    with report.countdown(settings.check, "check") as show:
        began = time.monotonic()

        def compute() -> torch.Tensor:
            show(time.monotonic() - began)
            losses = []
            for some, their_labels in batches:
                with autocast(world.device, settings.precision):
                    loss = cross_entropy(model(some), their_labels)
                (loss / settings.accumulate).backward()
                losses.append(loss.detach())
            return torch.stack(losses)

        found = ddp.check_ranks(model, compute, settings.check)
    for line in lines_of(found.hosts, found.seconds, found.repetitions):
        report.line(line)
    if found.equal and found.unequal:
        report.warning(f"the ranks' machines are not equal: {found.unequal}")
    report.result(str(found))
    # No rank may exit before rank 0 has printed: the launcher may then end the others.
    dist.barrier(group=group)
    return 0 if found.equal else 1


def lines_of(
    hosts: tuple[str, ...], seconds: tuple[float, ...], repetitions: tuple[int, ...]
) -> list[str]:
    """Returns a line for each rank with its time, and a mark if it is slow."""
    fastest, lines = min(seconds), []
    for rank, (host, own, count) in enumerate(zip(hosts, seconds, repetitions, strict=True)):
        factor = own / fastest
        slow = f", slow: {factor:.1f} times the fastest" if factor > _SLOW else ""
        lines.append(f"rank {rank} on {host}: {1e3 * own:,.2f} ms (of {count:,} times){slow}")
    return lines
