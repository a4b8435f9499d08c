"""Deals out this rank's part of a dataset, and computes the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.image_data import ImageData, Sample
from ddp_from_scratch.training.loaders import ShardSampler, test_loader, train_loader
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.process_group import World


@dataclass(frozen=True)
class Shards:
    """The loaders of one rank.

    Attributes:
        train: this rank's training images, dealt out by `sampler`.
        test: its test images, each on one rank.
        sampler: of `train`.
        global_batch_size: images of all ranks in an optimizer step.
        steps_per_epoch: optimizer steps.
        model_spec: of a model for these images, for `make_model`.
    """

    train: DataLoader[Sample]
    test: DataLoader[Sample]
    sampler: ShardSampler
    global_batch_size: int
    steps_per_epoch: int
    model_spec: dict[str, Any]


def deal(data: ImageData, settings: Settings, world: World) -> Shards:
    """Deals a dataset out. Does not communicate.

    Raises:
        UsageError: the batch size does not fit the ranks, or the images fill no optimizer step.
    """
    train = train_loader(data.train, settings, world)
    assert isinstance(train.sampler, ShardSampler)
    # Equal on all ranks: each gets as many batches, all of the same size.
    batches = train.sampler.batches_per_epoch
    if batches < settings.accumulate:
        raise UsageError(
            f"--accumulate {settings.accumulate} is more than the {batches} batches of an epoch"
        )
    return Shards(
        train,
        test_loader(data.test, settings, world),
        train.sampler,
        global_batch_size=train.sampler.batch_size * world.world_size * settings.accumulate,
        # Batches that do not fill a step are left out, as images that do not fill a batch.
        steps_per_epoch=batches // settings.accumulate,
        model_spec={
            "name": settings.model,
            "channels": data.channels,
            "image_size": data.image_size,
            "num_classes": data.num_classes,
        },
    )
