"""A run that was stopped and continued ends with the bits of one that was not."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn

from ddp_from_scratch.errors import PeerError, UsageError
from ddp_from_scratch.sync.check_sync import check_sync
from ddp_from_scratch.training import loop
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.settings import Settings
from tests.support.tiers import slow

# 1,437 images on 2 ranks: 5 steps of 4 x 32 images on each rank in an epoch.
SETTINGS = {"model": "dropout", "epochs": 3, "batch_size": 32, "accumulate": 4, "quiet": True}


class SometimesLouder(nn.Module):
    """What a model draws may come from Python's and numpy's generators, too."""

    def forward(self, images):
        return images * random.random() * np.random.rand() if self.training else images / 4


def model_with_dropout(name, *, channels, image_size, num_classes):
    """Each step's result depends on every rank's random generator and on batch norm."""
    inputs = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 32),
        nn.BatchNorm1d(32),
        nn.Dropout(),
        SometimesLouder(),
        nn.Linear(32, num_classes),
    )


def make_trainer(world, folder, **changes):
    loop.make_model = make_model if changes.get("model") == "cnn" else model_with_dropout
    settings = Settings(backend=world.backend, checkpoint_dir=folder, **SETTINGS | changes)
    return Trainer(settings, world)


def bits(trainer):
    """Everything that a later step could depend on."""
    momentum = [s["momentum_buffer"] for s in trainer.optimizer.state.values()]
    tensors = [*trainer.model.state_dict().values(), *momentum]
    generators = random.getstate(), np.random.get_state()[1].tolist()
    return [t.tolist() for t in tensors], torch.get_rng_state().tolist(), generators


def uninterrupted(world, folder, changes):
    trainer = make_trainer(world, folder, **changes)
    assert trainer.run() == 0
    check_sync(trainer.model)
    return bits(trainer) if world.rank == 0 else None


def stop_in_step(trainer, step):
    """A SIGTERM reaches this rank while it computes the given step."""
    compute = trainer._step

    def compute_and_signal(batches):
        number = trainer.global_step
        compute(batches)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._step = compute_and_signal


def stopped_and_resumed(world, folder, step, changes):
    trainer = make_trainer(world, folder, **changes)
    if world.rank == 1:
        stop_in_step(trainer, step)
    assert trainer.run() == signal.SIGTERM, "every rank stops, though only rank 1 was told"
    steps = trainer.global_step
    assert step < steps <= step + 2
    trainer = make_trainer(world, folder, resume="auto", **changes)
    assert trainer.global_step == steps
    assert trainer.run() == 0
    check_sync(trainer.model)
    return bits(trainer) if world.rank == 0 else None


POWERSGD = {"compress": "powersgd", "accumulate": 2, "shared_memory": False}
# Stopped in the first step, at the end of an epoch, after its last step, in the middle.
RESUMED = [
    ("gloo-2", 0, {}),
    ("mpi-2", 3, {}),
    ("gloo-2", 4, {}),
    ("mpi-2", 7, {"sync_batch_norm": True}),
    # With more than two ranks the buckets' layout decides the order of sums, and so the last bit.
    ("gloo-4", 6, {"model": "cnn", "accumulate": 1, "epochs": 1}),
    ("gloo-2", 6, {"compress": "bf16", "shared_memory": False}),
    # 11 steps in an epoch; PowerSGD begins with the 11th.
    ("gloo-2", 4, POWERSGD),
    ("gloo-2", 17, POWERSGD | {"precision": "fp16"}),
    slow("gloo-2", 6, {"precision": "fp16", "workers": 1, "scale_lr": True}),
    slow("mpi-2", 0, {}),
    slow("gloo-2", 3, {}),
    slow("mpi-2", 4, {}),
    slow("gloo-2", 7, {"sync_batch_norm": True}),
    slow("mpi-4", 6, {"model": "cnn", "accumulate": 1, "epochs": 1}),
]


@pytest.mark.parametrize(("crew", "step", "changes"), RESUMED)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks, tmp_path, crew, step, changes):
    backend, world_size = crew.split("-")
    crew = ranks(backend, int(world_size))
    expected = crew(uninterrupted, tmp_path / "a", changes)[0]
    assert crew(stopped_and_resumed, tmp_path / "b", step, changes)[0] == expected


@pytest.mark.parametrize(
    ("more", "without"),
    [({"sync_batch_norm": True}, {}), (POWERSGD, POWERSGD | {"compress": None})],
)
def test_an_option_changes_the_bits(ranks, tmp_path, more, without):
    crew = ranks("gloo", 2)
    found = [crew(uninterrupted, tmp_path / str(i), c)[0] for i, c in enumerate((more, without))]
    assert found[0] != found[1]


def drawn(world, seed):
    draws = []
    for _ in range(2):  # and again, wherever the generators stand
        make_trainer(world, None, seed=seed)
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    return draws[0]


def test_the_seed_is_that_of_all_generators_and_each_rank_has_its_own(ranks):
    crew = ranks("gloo", 2)
    seeds = (0, 7, 2**40 + 20, 2**62 - 2)  # numpy itself takes none above 2**32
    draws = [rank for seed in seeds for rank in crew(drawn, seed)]
    assert all(len(set(of_one)) == 2 * len(seeds) for of_one in zip(*draws, strict=True))
    assert crew(drawn, 7) == draws[2:4]


def without_batch_norm(world):
    loop.make_model = make_model
    with pytest.raises(UsageError) as error:
        Trainer(Settings(backend=world.backend, model="mlp", sync_batch_norm=True), world)
    return str(error.value)


def test_a_model_without_batch_norm_has_none_to_synchronise(ranks):
    text = "--sync-batch-norm: mlp has no batch norm"
    assert all(text in told for told in ranks("gloo", 2)(without_batch_norm))


def stopped(world, folder):
    trainer = make_trainer(world, folder)
    stop_in_step(trainer, 6)
    assert trainer.run() == signal.SIGTERM
    return trainer.global_step


def resumed(world, folder, changes):
    trainer = make_trainer(world, folder, resume="auto", **changes)
    at = (trainer.epoch, trainer.step, trainer.global_step)
    assert trainer.run() == 0
    check_sync(trainer.model)
    return at


def test_another_world_size_goes_on_at_the_same_images(ranks, tmp_path):
    """Stopped after step 8: 3 steps of 256 images into the second epoch."""
    assert ranks("gloo", 2)(stopped, tmp_path) == [8, 8]
    # On 3 ranks a step is 384 images and an epoch 3 steps: 768 images are 2 steps.
    assert ranks("gloo", 3)(resumed, tmp_path, {}) == [(1, 2, 5)] * 3


def test_the_same_global_batch_on_another_world_size(ranks, tmp_path):
    assert ranks("gloo", 2)(stopped, tmp_path) == [8, 8]
    changes = {"batch_size": 16}
    assert ranks("gloo", 4)(resumed, tmp_path, changes) == [(1, 3, 8)] * 4


def with_another_momentum(world, folder):
    trainer = make_trainer(world, folder, resume="auto", momentum=0.5, weight_decay=0.0)
    (group,) = trainer.optimizer.param_groups
    return group["momentum"], group["weight_decay"]


def test_settings_decide_and_not_the_checkpoint(ranks, tmp_path):
    ranks("gloo", 2)(stopped, tmp_path)
    assert ranks("gloo", 2)(with_another_momentum, tmp_path) == [(0.5, 0.0)] * 2


def two_runs_in_one_folder(world, folder):
    first = make_trainer(world, folder)
    with pytest.raises(UsageError, match="is in use by another run") as error:
        make_trainer(world, folder, resume="auto")
    assert isinstance(error.value, PeerError) == (world.rank != 0)
    assert first.run() == 0
    make_trainer(world, folder, resume="auto").run()  # it has let go


def test_a_second_run_in_a_folder_is_refused_on_every_rank(ranks, tmp_path):
    ranks("gloo", 2)(two_runs_in_one_folder, tmp_path)


def another_model(world, path):
    with pytest.raises(UsageError) as error:
        make_trainer(world, None, resume=str(path), model="other")
    assert isinstance(error.value, PeerError) == (world.rank != 0)
    assert "holds dropout for 10 classes of 1x8x8" in str(error.value)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks, tmp_path):
    ranks("gloo", 2)(stopped, tmp_path)
    path = max(tmp_path.glob("*.pt"))
    ranks("gloo", 2)(another_model, path)
