"""run.py's training on two ranks with simulated GPUs, beside the same on CPUs."""

import numpy as np
import pytest

from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.settings import Settings
from tests.support.tiers import slow

RUNS = {
    "cnn": {},
    "mlp, bf16 sent": {"model": "mlp", "compress": "bf16"},
    "batch norm over all ranks": {"sync_batch_norm": True},
    "resnet18": {"model": "resnet18", "sync_batch_norm": True, "bucket_cap_mb": 10.0},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "PowerSGD": {"compress": "powersgd", "model": "mlp"},
    "virtual_ranks": {"virtual_ranks": 4, "batch_size": 64},
    "timeline": {"timeline": "timeline", "model": "mlp"},
    "stragglers": {"stragglers": 2, "check_sync": 2, "model": "mlp"},
    "accumulated": {"accumulate": 2, "model": "mlp", "overlap": False},
}


def train(world, name, folder):
    changes = dict(RUNS[name])
    if "timeline" in changes:
        changes["timeline"] = folder / f"timeline-{world.backend}"
    settings = {"epochs": 1, "batch_size": 128, "quiet": True}
    settings["shared_memory"] = world.backend == "nccl"  # elsewhere sums as on GPUs
    trainer = Trainer(Settings(backend=world.backend, **settings | changes), world)
    if world.device.type == "cuda":
        from tests.support.simgpu import device, trace

        device.clear()
    assert trainer.run() == 0
    found = trace.faults() if world.device.type == "cuda" else []
    return [t.detach().cpu().float().numpy() for t in trainer.model.state_dict().values()], found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [n if n == "cnn" else slow(n) for n in RUNS])
def test_numbers_of_the_cpu_and_no_race(ranks, sim, name, tmp_path):
    expected, found = (crew(train, name, tmp_path, limit=140) for crew in (ranks("gloo", 2), sim))
    for (numbers, faults), (reference, _) in zip(found, expected, strict=True):
        assert faults == []
        tolerance = 0.01 if "16" in name else 1e-4
        for mine, theirs in zip(numbers, reference, strict=True):
            np.testing.assert_allclose(mine, theirs, tolerance, tolerance)
