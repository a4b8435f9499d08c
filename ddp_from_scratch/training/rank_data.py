"""Deals out this rank's part of a dataset, and computes the sizes that follow from it."""

from typing import Any

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.image_data import ImageData
from ddp_from_scratch.training.loaders import ShardSampler, test_loader, train_loader
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.process_group import World


class RankData:
    """The loaders of one rank. Does not communicate.

    Attributes:
        train: this rank's training images, dealt out by `sampler`.
        test: its test images, each on one rank.
        sampler: of `train`.
        global_batch_size: images of all ranks in an optimizer step.
        steps_per_epoch: optimizer steps.
        model_spec: of a model for these images, for `make_model`.

    Raises:
        UsageError: the batch size does not fit the ranks, or the images fill no optimizer step.
    """

    def __init__(self, data: ImageData, settings: Settings, world: World) -> None:
        if settings.shards is not None and settings.shards < world.world_size:
            raise UsageError(
                f"--shards must be at least the number of ranks, {world.world_size}, "
                f"got {settings.shards}"
            )
        self.train = train_loader(data.train, settings, world)
        self.test = test_loader(data.test, settings, world)
        assert isinstance(self.train.sampler, ShardSampler)
        self.sampler = self.train.sampler
        # Equal on all ranks: each gets as many batches, all of the same size.
        batches = self.sampler.batches_per_epoch
        if batches < settings.accumulate:
            raise UsageError(
                f"--accumulate {settings.accumulate} is more than the {batches} batches of an epoch"
            )
        parts = settings.parts(world.world_size)
        self.global_batch_size = self.sampler.batch_size * parts * settings.accumulate
        # Batches that do not fill a step are left out, as images that do not fill a batch.
        self.steps_per_epoch = batches // settings.accumulate
        self.model_spec: dict[str, Any] = {
            "name": settings.model,
            "channels": data.channels,
            "image_size": data.image_size,
            "num_classes": data.num_classes,
        }
