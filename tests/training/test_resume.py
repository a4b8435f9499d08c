"""A run that was stopped and continued ends with the bits of one that was not."""

import os
import random
import shutil
import signal
from itertools import cycle
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.common.errors import PeerError, UsageError
from ddp_from_scratch.sync.check_sync import check_sync
from ddp_from_scratch.training import checkpoint, loop
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.virtual_ranks.balance import Balance
from tests.support.on_ranks import on
from tests.support.tiers import slow

# 1,437 images on 2 ranks: 5 steps of 4 x 32 images on each rank in an epoch.
SETTINGS = {"model": "dropout", "epochs": 3, "batch_size": 32, "accumulate": 4, "quiet": True}
# 11 steps in an epoch; PowerSGD begins with the 11th.
POWERSGD = {"compress": "powersgd", "accumulate": 2, "shared_memory": False}
INT8 = {"compress": "int8", "shared_memory": False}
# 5 steps of 8 virtual ranks x 2 x 16 images in an epoch.
VIRTUAL_RANKS = {"virtual_ranks": 8, "accumulate": 2, "batch_size": 16, "epochs": 2}


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
    settings = Settings(backend=world.backend, checkpoint_dir=folder, **SETTINGS | changes)
    make = make_model if changes.get("model") in ("cnn", "mlp") else model_with_dropout
    with patch.object(loop, "make_model", make):
        return Trainer(settings, world)


def stop_in_step(trainer, step):
    compute, number = trainer._step, trainer.global_step

    def compute_and_signal(batches):
        nonlocal number
        compute(batches)
        number += 1
        if number - 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._step = compute_and_signal


def run(world, folder, changes, stop=None, resume=None, on_rank=0):
    """Trains to the end, or until the step `stop`; what a later step could depend on."""
    trainer = make_trainer(world, folder, resume=resume, **changes)
    begin = (trainer.epoch, trainer.step, trainer.global_step)
    if stop is not None and world.rank == on_rank:
        stop_in_step(trainer, stop)
    ended = trainer.run()
    assert ended == (0 if stop is None else signal.SIGTERM), "every rank stops, if one was told"
    assert stop is None or stop < trainer.global_step <= stop + 2
    check_sync(trainer.model)
    of_optimizer = trainer.optimizer.state_dict()["state"]
    state = [t for of_one in of_optimizer.values() for t in of_one.values()]
    tensors = [*trainer.model.state_dict().values(), *state]
    generators = random.getstate(), np.random.get_state()[1].tolist()
    return begin, [t.tolist() for t in tensors], torch.get_rng_state().tolist(), generators


def crew_of(ranks, name):
    backend, world_size = name.split("-")
    return ranks(backend, int(world_size))


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """What rank 0 has at the end of a run that is left alone, and its folder; each trained once."""
    found = {}

    def end_of(crew, changes):
        key = (crew, str(changes))
        if key not in found:
            folder = tmp_path_factory.mktemp("whole")
            found[key] = crew_of(ranks, crew)(run, folder, changes)[0][1:], folder
        return found[key]

    return end_of


# Stopped in the first step, at the end of an epoch, after its last step, in the middle.
@pytest.mark.parametrize(
    ("crew", "step", "changes"),
    [
        *(("gloo-2", 0, {}), ("gloo-2", 3, {}), ("mpi-2", 4, {})),
        ("gloo-2", 7, {"sync_batch_norm": True}),
        ("gloo-2", 3, {"optimizer": "adamw", "epochs": 1}),
        ("gloo-2", 3, {"optimizer": "adamw", "epochs": 1, "shard": "world"}),
        ("mpi-2", 3, {"optimizer": "muon", "model": "mlp", "epochs": 1}),
        ("gloo-2", 17, POWERSGD | {"precision": "fp16"}),
        ("gloo-2", 7, INT8 | {"precision": "fp16"}),
        # From three ranks on the buckets' layout decides the order of sums, and the last bit.
        ("gloo-4", 6, {"model": "cnn", "accumulate": 1, "epochs": 1}),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_left_alone(ranks, tmp_path, whole, crew, step, changes):
    crew_of(ranks, crew)(run, tmp_path, changes, step, None, 1)
    resumed = crew_of(ranks, crew)(run, tmp_path, changes, None, "auto")
    assert resumed[0][1:] == whole(crew, changes)[0]
    if changes:
        other = {"accumulate": changes.get("accumulate", 4)}
        assert changes.get("model") or resumed[0][1] != whole(crew, other)[0][0]


def run_to_evaluation(world, folder, changes, batch, number):
    """Rank 1 alone gets the signal before this batch of the first evaluation."""
    trainer, batches = make_trainer(world, folder, **changes), 0
    of_test = trainer._test_batches

    def batches_and_signal():
        nonlocal batches
        for found in of_test():
            if batches == batch and world.rank == 1:
                os.kill(os.getpid(), number)
            batches += 1
            yield found

    trainer._test_batches = batches_and_signal
    return trainer.run(), trainer.epoch, trainer.step, batches


# 180 images on each rank are 6 batches. In the last one the evaluation ends, and then a step.
@pytest.mark.parametrize(
    ("crew", "batch", "number", "place", "changes"),
    [
        ("gloo-2", 0, signal.SIGTERM, (0, 5, 2), {}),
        ("mpi-2", 2, signal.SIGUSR1, (0, 5, 4), {}),
        ("gloo-2", 5, signal.SIGINT, (1, 1, 6), {}),
        slow("gloo-2", 2, signal.SIGTERM, (0, 5, 4), {"optimizer": "adamw", "shard": "world"}),
    ],
)
def test_a_run_that_is_stopped_in_an_evaluation_loses_no_step(
    ranks, tmp_path, whole, crew, batch, number, place, changes
):
    stopped = crew_of(ranks, crew)(run_to_evaluation, tmp_path, changes, batch, number)
    assert stopped == [(number, *place)] * 2
    resumed = crew_of(ranks, crew)(run, tmp_path, changes, None, "auto")
    assert resumed[0][0][:2] == place[:2]
    assert resumed[0][1:] == whole(crew, changes)[0]


def contents(folder):
    """The newest checkpoint, but for what says on how many ranks it was written."""

    def flat(state, name=""):
        if isinstance(state, dict):
            for key, value in state.items():
                yield from flat(value, f"{name}/{key}")
        else:
            is_tensor = isinstance(state, torch.Tensor)
            yield name, state.numpy().tobytes() if is_tensor else state

    state = checkpoint.load(checkpoint.files(folder)[0])
    return dict(flat({n: v for n, v in state.items() if n not in ("world_size", "settings")}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        slow({"model": "mlp", "precision": "fp16"}),
        slow({"optimizer": "adamw", "shard": "world"}),
    ],
)
def test_virtual_ranks_are_resumed_on_another_number_of_ranks(ranks, whole, tmp_path, changes):
    changes = VIRTUAL_RANKS | changes
    ranks("gloo", 3)(run, tmp_path, changes, 1)
    assert 0 < contents(tmp_path)["/step"] < 5
    ranks("gloo", 2)(run, tmp_path, changes, 6, "auto")
    assert contents(tmp_path)["/epoch"] == 1
    ranks("gloo", 1)(run, tmp_path, changes, None, "auto")
    assert contents(tmp_path)["/rng"] == []
    assert contents(tmp_path) == contents(whole("gloo-1", changes)[1])


def dealt_anew(world, folder, changes):
    """Changes the deal every few averages, whatever the ranks' speed."""
    deals = cycle([[3, 5], [3, 5], [7, 1], [7, 1], [4, 4]])

    def learn(balance, seconds):
        balance.counts = next(deals)

    with patch.object(Balance, "learn", learn):
        return run(world, folder, changes | {"balance": True})


@pytest.mark.parametrize("workers", [0, slow(1)])
def test_the_loader_follows_a_new_deal_of_virtual_ranks(ranks, whole, tmp_path, workers):
    dealt = VIRTUAL_RANKS | {"workers": workers}
    ranks("gloo", 2)(dealt_anew, tmp_path, dealt, limit=60)
    assert contents(tmp_path) == contents(whole("gloo-1", VIRTUAL_RANKS)[1])


def refusals(world, stopped):
    def refused(folder=None, **changes):
        with pytest.raises(UsageError) as error:
            make_trainer(world, folder, **changes)
        assert isinstance(error.value, PeerError) == (world.rank != 0)
        return str(error.value)

    told = refused(resume=str(max(stopped.glob("*.pt"))), model="other")
    assert "holds dropout for 10 classes of 1x8x8" in told
    told = refused(resume=str(max(stopped.glob("*.pt"))), optimizer="adamw")
    assert "holds the state of --optimizer sgd, this run has adamw: give --optimizer sgd" in told
    told = refused(optimizer="muon", model="cnn")
    assert "--optimizer muon steps matrices of hidden layers, and cnn has none: use adamw" in told
    first = make_trainer(world, stopped, resume="auto", momentum=0.5, weight_decay=0.0)
    (group,) = first.optimizer.param_groups  # settings decide, and not the checkpoint
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.0)
    assert "is in use by another run" in refused(stopped, resume="auto")
    assert first.run() == 0
    make_trainer(world, stopped, resume="auto").run()  # it has let go
    told = refused(model="mlp", sync_batch_norm=True)
    assert "--sync-batch-norm: mlp has no batch norm" in told
    told = refused(virtual_ranks=1)
    assert "--virtual-ranks must be at least the number of ranks, 2, got 1" in told


def test_another_run_is_refused_on_every_rank_but_not_another_world_size(ranks, tmp_path):
    """Stopped after step 8: 3 steps into the second epoch."""
    ranks("gloo", 2)(run, tmp_path / "one", {}, 6)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    # On 3 ranks a step is 384 images and an epoch 3 steps: 768 images are 2 steps.
    found = ranks("gloo", 3)(run, tmp_path / "one", {}, None, "auto")
    assert [begin for begin, *_ in found] == [(1, 2, 5)] * 3
    ranks("gloo", 2)(refusals, tmp_path / "two")


@on("gloo-2")
def test_the_seed_is_that_of_all_generators_and_each_rank_has_its_own(world):
    draws = set()
    for seed in (0, 2**62 - 2, 0):  # numpy itself takes none above 2**32
        make_trainer(world, None, seed=seed)
        draws.add((torch.rand(()).item(), random.random(), np.random.rand()))
    assert len(draws) == 2
    assert len({number for of_seed in draws for number in of_seed}) == 6
    everyone = [None] * 2
    dist.all_gather_object(everyone, draws)
    assert not everyone[0] & everyone[1]


def resumed_from_auto(world, folder):
    trainer = make_trainer(world, folder, epochs=1)
    trainer.run()
    state = checkpoint.load(checkpoint.files(folder)[0])
    state["buckets"] = {"bucket_cap_mb": 4.0, "overlap": True}
    state["settings"]["bucket_cap_mb"] = "auto"
    checkpoint.save(folder, state)
    with patch.object(Report, "warning") as warning:
        resumed = make_trainer(world, folder, resume="auto", epochs=1)
    assert resumed.epoch == 1
    for name, value in trainer.model.state_dict().items():
        assert resumed.model.state_dict()[name].equal(value)
    return [call.args for call in warning.mock_calls]


def test_a_checkpoint_of_a_run_that_searched_for_its_buckets_is_resumed(ranks, tmp_path):
    """Earlier versions had `--bucket-cap-mb auto`, and kept what it chose."""
    (told,) = ranks("gloo", 1)(resumed_from_auto, tmp_path)
    assert told == [("not as in the checkpoint: bucket_cap_mb auto -> None",)]


def remembered(trainer):
    saved = trainer.compression.state.state_dict(trainer.model)
    scale = trainer.scaler.get_scale()
    return saved["iteration"], {n: (e / scale).tolist() for n, e in saved["errors"].items()}


def stopped_with_power_sgd(world, folder, changes):
    trainer = make_trainer(world, folder, **changes)
    stop_in_step(trainer, 17)
    trainer.run()
    return remembered(trainer)


def resumed_with_power_sgd(world, folder, changes):
    """What a resumed run remembers, and its warnings."""
    told = []
    with patch.object(Report, "warning", lambda self, text: told.append(text)):
        trainer = make_trainer(world, folder, resume="auto", **changes)
    found = remembered(trainer)
    assert trainer.run() == 0
    check_sync(trainer.model)
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    return *found, told


def test_another_world_size_remembers_the_mean_of_what_power_sgd_left_out(ranks, tmp_path):
    changes = POWERSGD | {"precision": "fp16"}
    (before, first), (_, second) = ranks("gloo", 2)(stopped_with_power_sgd, tmp_path, changes)
    replies = ranks("gloo", 3)(resumed_with_power_sgd, tmp_path, changes)
    for count, errors, _ in replies:
        assert count == before
        assert errors.keys() == first.keys()
        for name, found in errors.items():
            mean = (torch.tensor(first[name]) + torch.tensor(second[name])) / 2
            assert torch.tensor(found).equal(mean)
    size, memory = replies[0][-1]
    assert "world_size 2 -> 3" in size
    assert "mean of the PowerSGD errors of 2 ranks" in memory


def resumed_without_errors(world, folder, changes):
    told = []
    with patch.object(Report, "warning", lambda self, text: told.append(text)):
        trainer = make_trainer(world, folder, resume="auto", **changes)
    state = trainer.compression.state
    assert state is None or not any(state.state_dict(trainer.model)["errors"])
    assert trainer.run() == 0
    check_sync(trainer.model)
    return told


@pytest.mark.parametrize(
    ("world_size", "changes", "told"),
    [
        (3, INT8, "int8's error feedback is reset: the checkpoint has that of 2 ranks, this run 3"),
        (2, INT8 | {"compress": "bf16"}, "int8's error feedback is reset"),
        (2, INT8 | {"compress": "powersgd"}, "int8's error feedback is reset"),
    ],
)
def test_errors_of_int8_are_reset_where_they_do_not_fit(ranks, tmp_path, world_size, changes, told):
    ranks("gloo", 2)(run, tmp_path, INT8, 7)
    (changed, reset), *_ = ranks("gloo", world_size)(resumed_without_errors, tmp_path, changes)
    assert "not as in the checkpoint" in changed
    assert reset == told


def keep_threads(world, folder):
    settings = {"epochs": 1, "virtual_ranks": 2, "checkpoint_dir": folder, "quiet": True}
    torch.set_num_threads(2)
    Trainer(Settings(**settings), world).run()
    torch.set_num_threads(1)
    Trainer(Settings(**settings, resume="auto"), world)
    return torch.get_num_threads()


@pytest.mark.slow
def test_threads_are_those_of_the_checkpoint(ranks, tmp_path):
    assert ranks("gloo", 1, fresh=True)(keep_threads, tmp_path) == [2]
