"""Ranks that were asked for different things: known before they train, to all, in one line."""

from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.errors import PeerError, UsageError
from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.training import evaluate, process_setup
from ddp_from_scratch.training.coordination import differences
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.process_group import _check_gpus, _device, _meet_in_store
from tests.support.tiers import slow

# One value for rank 0, another for rank 1.
DIFFERENT = {
    "backend": ("gloo", "mpi"),
    "dataset": ("digits", "fake"),
    "model": ("cnn", "mlp"),
    "epochs": (1, 2),
    "batch_size": (32, 16),
    "global_batch_size": (None, 64),
    "lr": (0.05, 0.1),
    "scale_lr": (False, True),
    "momentum": (0.9, 0.0),
    "weight_decay": (1e-4, 0.0),
    "bucket_cap_mb": (None, "auto"),
    "overlap": (True, False),
    "shared_memory": (True, False),
    "compress": (None, "bf16"),
    "powersgd_rank": (1, 2),
    "sync_batch_norm": (False, True),
    "accumulate": (1, 2),
    "shards": (2, 4),
    "precision": ("fp32", "bf16"),
    "seed": (0, 1),
    "deterministic": (False, True),
    "stop_on_nan": (False, True),
    "timeout": (600.0, 60.0),
    "stall_after": (60.0, 6.0),
    "checkpoint_dir": (None, Path("/nowhere")),
    "resume": (None, "x.pt"),
    "timeline": (None, Path("/nowhere")),
    "timeline_steps": (1, 2),
    "stragglers": (None, 100),
    "check_sync": (None, 0),
    "go_on": (False, True),
    "max_failures": (None, 2),
}
# Without these a value is refused on each rank by itself.
NEEDED = {
    "powersgd_rank": {"compress": "powersgd"},
    "timeline_steps": {"timeline": Path("t")},
    "max_failures": {"go_on": True},
}
OWN = {"data_dir", "download", "workers", "threads", "log_dir", "quiet"}


def test_differences_are_told_with_both_values_and_ranks():
    alike = {"--lr": "0.1", "torch": "2.15"}
    assert differences([alike, alike, alike]) is None
    assert differences([alike, alike, alike | {"--lr": "0.2"}]) == (
        "--lr is 0.1 on rank 0 and 0.2 on rank 2: it must be the same on all ranks"
    )
    assert differences([alike, alike | {"--lr": "0.2"}, {"torch": "2.11"}]) == (
        "--lr is 0.1 on rank 0 and 0.2 on rank 1; torch is 2.15 on rank 0 and 2.11 on rank 2: "
        "they must be the same on all ranks"
    )


def test_every_setting_is_compared_or_a_ranks_own():
    assert DIFFERENT.keys() | OWN == {field.name for field in fields(Settings)}


def refusals(world):
    """What is said for each setting, on this rank."""
    told = {}
    for name, values in DIFFERENT.items():
        more = NEEDED.get(name, {})
        settings = Settings(**{name: values[world.rank]}, **more)
        with pytest.raises(UsageError) as error:
            Trainer(settings, world)
        assert type(error.value) is (PeerError if world.rank else UsageError), "told once"
        told[name] = str(error.value)
    return told


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_setting_that_differs_is_named_before_anything_is_trained(ranks, backend):
    zero, one = ranks(backend, 2)(refusals)
    assert zero == one
    same = "it must be the same on all ranks"
    assert zero["lr"] == f"--lr is 0.05 on rank 0 and 0.1 on rank 1: {same}"
    for name, text in zero.items():
        option = "no-" * (name in ("overlap", "shared_memory")) + name.replace("_", "-")
        assert text.startswith(f"--{option} is "), text
        assert text.endswith(f" on rank 1: {same}"), text
    assert "--scale-lr is not given on rank 0 and given on rank 1: " in zero["scale_lr"]
    assert "--no-overlap is not given on rank 0 and given on rank 1: " in zero["overlap"]
    assert "--check-sync is not given on rank 0 and 0 on rank 1: " in zero["check_sync"]


def with_its_own(world, folder):
    own = folder / str(world.rank)
    settings = Settings(
        data_dir=own,
        download=world.rank == 0,
        workers=world.rank,
        threads=world.rank + 1,
        log_dir=own if world.rank else None,
        quiet=world.rank > 0,
        checkpoint_dir=own,
        resume="auto",
    )
    threads = torch.get_num_threads()
    Trainer(settings, world)
    torch.set_num_threads(threads)


def test_what_may_differ(ranks, tmp_path):
    ranks("gloo", 2)(with_its_own, tmp_path)


def refused(work, *arguments):
    with pytest.raises(UsageError) as error:
        work(*arguments)
    return str(error.value)


def training_and_a_test(world):
    if world.rank == 0:
        return refused(Trainer, Settings(), world)
    return refused(evaluate.test, Settings(), None, Path("x.pt"), world)


def a_test_on_another_dataset(world):
    dataset = "fake" if world.rank else None
    return refused(evaluate.test, Settings(), dataset, Path("x.pt"), world)


def test_the_command_is_compared_too(ranks):
    (told,) = set(ranks("gloo", 2)(training_and_a_test))
    assert told.startswith("the command is train on rank 0 and test on rank 1")
    (told,) = set(ranks("gloo", 2)(a_test_on_another_dataset))
    assert told.startswith("--dataset is not given on rank 0 and fake on rank 1: ")


def with_another(world, name):
    before = process_setup.versions
    process_setup.versions = lambda: before() | ({name: "1.0"} if world.rank else {})
    try:
        return refused(Trainer, Settings(), world)
    finally:
        process_setup.versions = before


@pytest.mark.parametrize("name", ["torch", "torchvision", "ddp_from_scratch's source"])
def test_versions_are_compared(ranks, name):
    (told,) = set(ranks("gloo", 2)(with_another, name))
    assert told == (
        f"{name} is {process_setup.versions()[name]} on rank 0 and 1.0 on rank 1: it must be the "
        "same on all ranks"
    )
    assert process_setup.versions()["torch"] == torch.__version__


def with_other_images(world):
    load = process_setup.load_dataset

    def changed(*arguments, **named):
        data = load(*arguments, **named)
        if world.rank == 1:
            data.train.data[3, 0, 0] += 1  # a pixel
        return data

    process_setup.load_dataset = changed
    try:
        return refused(Trainer, Settings(), world)
    finally:
        process_setup.load_dataset = load


def test_the_images_are_compared(ranks):
    (told,) = set(ranks("gloo", 2)(with_other_images))
    assert told.startswith("--dataset digits is 1,437 + 360 images of 1x8x8, checksum ")
    assert told.count(", checksum ") == 2


def test_another_backend_is_known_before_the_group_is_opened():
    """Ranks that open groups of different backends would wait for each other."""
    store, limit = dist.HashStore(), timedelta(seconds=0.1)
    cpu, places = torch.device("cpu"), [Placement(r, 3, r, 3, 0, "torchrun") for r in range(3)]
    with pytest.raises(UsageError, match=r"rank 1 waited 0.1 s for all 3 ranks: .* \[0, 2\] have"):
        _meet_in_store(store, "gloo", places[1], cpu, limit)
    with pytest.raises(UsageError, match=r"\[2\] have not come"):
        _meet_in_store(store, "gloo", places[0], cpu, limit)
    with pytest.raises(UsageError, match="backend is gloo on rank 0 and nccl on rank 2: it must"):
        _meet_in_store(store, "nccl", places[2], cpu, limit)
    for place in places[:2]:
        _meet_in_store(store, "gloo", place, cpu, limit)


def test_two_ranks_on_one_gpu_are_named():
    _check_gpus(["", "", ""])
    _check_gpus(["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(UsageError, match="ranks 1 and 3 have the same GPU GPU-b"):
        _check_gpus(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_world_size", "index"),
    [(8, 3, 8, 3), (1, 3, 8, 0), (1, 0, 1, 0), (4, 0, 1, 0), (0, 0, 1, None), (4, 0, 8, None)],
)
def test_the_gpu_of_a_process(monkeypatch, visible, local_rank, local_world_size, index):
    """srun --gpus-per-task=1 and wrappers show each process its own alone."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    placement = Placement(local_rank, local_world_size, local_rank, local_world_size, 0, "srun")
    if index is None:
        with pytest.raises(UsageError, match=f"{visible} visible GPUs"):
            _device("nccl", placement)
    else:
        assert _device("nccl", placement) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)] * (index is not None)
