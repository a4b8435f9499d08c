"""Ranks with different settings: all know before they train, in one line."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ddp_from_scratch.common.errors import PeerError, UsageError
from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.training import coordination, evaluation, loop
from ddp_from_scratch.training.settings import Settings, option_of
from ddp_from_scratch.world.world import _check_gpus, _device
from tests.support.on_ranks import on
from tests.support.refusal import refusal

# May differ: they concern a rank's machine, or the output of rank 0.
OWN = {"data_dir", "download", "workers", "threads", "log_dir", "quiet"}
# Another value on rank 1, and the two as they are told.
DIFFERENT = {
    "lr": (0.1, "--lr is 0.05 on rank 0 and 0.1"),
    "bucket_cap_mb": (4.0, "--bucket-cap-mb is not given on rank 0 and 4.0"),
    "overlap": (False, "--no-overlap is not given on rank 0 and given"),
    "resume": ("x.pt", "--resume is not given on rank 0 and given"),
}


def test_every_setting_is_compared_or_a_ranks_own():
    names = {field.name for field in fields(Settings)}
    assert Settings().to_compare().keys() == {option_of(name) for name in names - OWN}
    auto, elsewhere = (Settings(resume="auto", checkpoint_dir=Path(f)).to_compare() for f in "cd")
    assert auto == elsewhere
    assert auto["--resume"] == "auto"  # which all decide by rank 0's folder


@on("gloo-2")
def test_a_setting_that_differs_is_named_before_anything_is_trained(world):
    for name, (other, told) in DIFFERENT.items():
        settings = Settings(**{name: other} if world.rank else {})
        with pytest.raises(UsageError) as error:
            loop.Trainer(settings, world)
        assert type(error.value) is (PeerError if world.rank else UsageError), "told once"
        assert str(error.value) == f"{told} on rank 1: it must be the same on all ranks"


@on("gloo-2")
def test_the_command_versions_and_images_are_compared(world):
    settings, file = Settings(), Path("x.pt")
    if world.rank == 0:
        told = refusal(loop.Trainer, settings, world)
    else:
        told = refusal(evaluation.test, settings, None, file, world)
    assert told.startswith("the command is train on rank 0 and test on rank 1")

    versions = coordination.versions()
    assert {"torch", "torchvision", "ddp_from_scratch's source"} <= versions.keys()
    other = versions | ({"torch": "1.0"} if world.rank else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordination, "versions", lambda: other)
        told = refusal(loop.Trainer, settings, world)
    assert told.startswith(f"torch is {torch.__version__} on rank 0 and 1.0 on rank 1: it must")

    load = coordination.load_dataset

    def changed(*arguments, **named):
        data = load(*arguments, **named)
        data.train.data[3, 0, 0] += world.rank  # a pixel
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordination, "load_dataset", changed)
        told = refusal(loop.Trainer, settings, world)
    assert told.startswith("--dataset digits is 1,437 + 360 images of 1x8x8, checksum ")
    assert told.count(", checksum ") == 2


def test_two_ranks_on_one_gpu_are_named():
    _check_gpus(["", "", ""])
    with pytest.raises(UsageError, match="ranks 1 and 3 have the same GPU GPU-b"):
        _check_gpus(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_world_size", "index"),
    [(8, 3, 8, 3), (1, 3, 8, 0), (4, 0, 8, None)],
)
def test_the_gpu_of_a_process(monkeypatch, visible, local_rank, local_world_size, index):
    """srun --gpus-per-task=1 and wrappers show each process its own alone."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    placement = Placement(local_rank, local_world_size, local_rank, local_world_size, 0, "srun")
    if index is None:
        assert f"{visible} visible GPUs" in refusal(_device, "nccl", placement)
    else:
        assert _device("nccl", placement) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)] * (index is not None)
