"""A loss that is not finite: reported once, with its step and rank, and never saved."""

import math
from unittest.mock import patch

import pytest

from ddp_from_scratch.common.errors import PeerError, UsageError
from ddp_from_scratch.training import checkpoint, loop
from ddp_from_scratch.training.settings import Settings
from tests.support.on_ranks import on
from tests.support.tiers import slow

STEPS = 22  # of an epoch: 1,437 images on 2 ranks in batches of 32
STOPS = "a smaller --lr may help; --resume auto continues from the last checkpoint"


def trained(world, folder, step, loss):
    """How it ends, and the number of checkpoints, with this loss from a step on."""
    settings = Settings(backend=world.backend, model="mlp", epochs=2, checkpoint_dir=folder)
    trainer = loop.Trainer(settings, world)
    compute = loop.cross_entropy

    def computed(outputs, labels):
        bad = world.rank == 1 and trainer.global_step >= step
        return compute(outputs, labels) * (loss if bad else 1.0)

    with patch.object(loop, "cross_entropy", computed):
        try:
            ended = trainer.run()
        except UsageError as error:
            ended = str(error)
            if type(error) is not (PeerError if world.rank else UsageError):
                ended += ", told twice"
    return ended, len(checkpoint.files(folder))


@pytest.mark.parametrize(
    ("backend", "step", "loss", "kept"),
    [
        ("gloo", 7, math.inf, 0),
        ("gloo", STEPS - 1, math.nan, 0),
        ("gloo", STEPS + 3, math.nan, 1),
        slow("mpi", STEPS - 1, math.nan, 0),
    ],
)
def test_it_ends_all_ranks_and_is_reported_once(ranks, tmp_path, backend, step, loss, kept):
    zero, one = ranks(backend, 2)(trained, tmp_path, step, loss)
    ended, files = zero
    assert (zero, files) == (one, kept)
    epoch, of_epoch = divmod(step, STEPS)
    place = f"the loss is not finite in epoch {epoch + 1}, step {of_epoch + 1}/22, on rank 1"
    assert ended == f"{place}: {STOPS}"


@on("gloo-2")
def test_gradients_that_overflow_are_the_scalers_matter(world):
    """They are infinite in the first steps, which are left out; the losses are not."""
    settings = Settings(backend=world.backend, model="mlp", epochs=1, precision="fp16")
    trainer = loop.Trainer(settings, world)
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0**40})
    assert trainer.run() == 0
    assert trainer.scaler.get_scale() <= 2.0**30
