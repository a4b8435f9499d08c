"""`run.py --shards`: the same images, steps and checkpoints on any number of ranks."""

from itertools import chain

import pytest
import torch

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.settings import Settings
from tests.support.tiers import slow
from tests.training.test_loaders import Numbers, batches, train_loader
from tests.training.test_resume import make_trainer, stop_in_step

# 1,437 images: 5 steps of 8 shards x 2 x 16 images in an epoch.
CHANGES = {"shards": 8, "accumulate": 2, "batch_size": 16, "epochs": 2}


def images_of_shards(world_size, accumulate):
    """The image indices of each step's shards, whoever has them."""
    found = {}
    for rank in range(world_size):
        loader = train_loader(
            Numbers(100), rank, world_size, batch_size=3, shards=4, accumulate=accumulate
        )
        assert len(loader) == 8 * len(range(rank * 4 // world_size, (rank + 1) * 4 // world_size))
        mine = iter(batches(loader))
        shards = range(rank * 4 // world_size, (rank + 1) * 4 // world_size)[::-1]
        for step in range(8 // accumulate):
            for shard in shards:
                found[step, shard] = [next(mine) for _ in range(accumulate)]
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_shard_has_its_images_whatever_the_number_of_ranks(accumulate):
    alone = images_of_shards(1, accumulate)
    for world_size in (2, 3, 4):
        assert images_of_shards(world_size, accumulate) == alone
    seen = list(chain.from_iterable(chain.from_iterable(alone.values())))
    assert len(set(seen)) == len(seen) == 96
    # As on four ranks without shards.
    ordinary = batches(train_loader(Numbers(100), 2, 4, batch_size=3))
    assert [batch for step in range(8 // accumulate) for batch in alone[step, 2]] == ordinary


def test_sizes_and_rates_go_by_shards():
    settings = Settings(shards=4, global_batch_size=48, accumulate=2)
    assert {settings.rank_batch_size(ranks) for ranks in (1, 2, 3)} == {6}
    with pytest.raises(UsageError, match="multiple of 16 --shards x --accumulate 1 = 16, got 8"):
        Settings(shards=16, global_batch_size=8).rank_batch_size(2)
    scaled = Settings(shards=4, lr=0.1, scale_lr=True, accumulate=2, epochs=20)
    assert [scaled.learning_rate(9, 2, ranks) for ranks in (1, 3)] == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"shards": 3}, "--shards must be a power of two, got 3"),
        ({"shards": 0}, "--shards must be a power of two, got 0"),
        ({"compress": "bf16"}, "--compress cannot be used with --shards: leave it out"),
        ({"bucket_cap_mb": "auto"}, "--bucket-cap-mb auto cannot be used with --shards: give a"),
    ],
)
def test_options_that_do_not_go_together(more, text):
    with pytest.raises(UsageError) as error:
        Settings(**{"shards": 2} | more)
    assert str(error.value).startswith(text)


def too_few(world):
    with pytest.raises(UsageError) as error:
        make_trainer(world, None, shards=2)
    return str(error.value)


def test_fewer_shards_than_ranks(ranks):
    told = ranks("gloo", 3)(too_few)
    assert all("--shards must be at least the number of ranks, 3, got 2" in text for text in told)


def run(world, folder, resume, stop, changes):
    trainer = make_trainer(world, folder, resume=resume, **CHANGES | changes)
    if stop is not None and world.rank == 0:
        stop_in_step(trainer, stop)
    trainer.run()


def tensors(state, name=""):
    """All that a later step depends on, flat."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{name}/{key}")
    else:
        yield name, state.tolist() if isinstance(state, torch.Tensor) else state


def contents(folder):
    """The newest checkpoint, but for what says on how many ranks it was written."""
    state = checkpoint.load(checkpoint.files(folder)[0], torch.device("cpu"))
    for name in ("world_size", "settings"):
        del state[name]
    return dict(tensors(state))


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """The contents after a run on one rank."""
    found = {}

    def contents_of(**changes):
        key = str(changes)
        if key not in found:
            folder = tmp_path_factory.mktemp("alone")
            ranks("gloo", 1)(run, folder, None, None, changes)
            found[key] = contents(folder)
        return found[key]

    return contents_of


@pytest.mark.parametrize(
    ("crew", "changes"),
    [
        ("gloo-3", {}),
        *(slow(crew, {}) for crew in ("gloo-2", "mpi-3", "gloo-4", "gloo-8")),
        *(("gloo-3", {"sync_batch_norm": True}), slow("mpi-2", {"sync_batch_norm": True})),
    ],
)
def test_checkpoints_are_the_same_on_any_number_of_ranks(ranks, alone, tmp_path, crew, changes):
    backend, world_size = crew.split("-")
    ranks(backend, int(world_size))(run, tmp_path, None, None, changes)
    found = contents(tmp_path)
    assert found == alone(**changes)
    assert found["/rng"] == []


@pytest.mark.parametrize("precision", ["fp32", slow("fp16")])
def test_a_run_is_resumed_on_another_number_of_ranks(ranks, alone, tmp_path, precision):
    changes = {"precision": precision, "model": "cnn"}
    ranks("gloo", 3)(run, tmp_path, None, 1, changes)
    middle = contents(tmp_path)
    assert 0 < middle["/step"] < 5
    ranks("gloo", 2)(run, tmp_path, "auto", 6, changes)
    assert contents(tmp_path)["/epoch"] == 1
    ranks("gloo", 1)(run, tmp_path, "auto", None, changes)
    assert contents(tmp_path) == alone(**changes)
