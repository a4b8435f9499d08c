"""What belongs to GPUs and can be shown without one, real or simulated."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from ddp_from_scratch.common import gpu
from ddp_from_scratch.watch.record import Clock


class FakeEvent:
    """An event of a GPU's clock, in ms, whose differences are float32 as CUDA's are."""

    now = 0.0

    def __init__(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return float(np.float32(other.at - self.at))


@pytest.mark.parametrize("hours", [0, 1, 24, 72])
def test_phases_of_a_step_are_exact_however_long_the_run(monkeypatch, hours):
    monkeypatch.setattr(gpu, "record", lambda device, timed: FakeEvent())
    monkeypatch.setattr(gpu, "synchronize", lambda device: None)
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    clock = Clock(torch.device("cuda", 0))
    FakeEvent.now += hours * 3_600_000
    phases = [0.2, 2.1, 4.1, 0.8, 0.9]
    for _ in range(3):
        taken = [clock.take()]
        for phase in phases:
            FakeEvent.now += phase
            taken.append(clock.take())
        seconds = [clock.seconds(mark) for mark in taken]
        found = [1e3 * (end - begin) for begin, end in pairwise(seconds)]
    assert found == pytest.approx(phases, abs=1e-3)


@pytest.mark.slow
def test_a_preload_that_asked_for_gpus_makes_forks_unsafe():
    # As torch.cuda.is_available() does where NVML is missing.
    program = (
        "import torch; from ddp_from_scratch.launch import fork_server as f;"
        "before = f._can_run_in_a_fork(); torch._C._cuda_getDeviceCount();"
        "print(before, f._can_run_in_a_fork(), torch.cuda.is_initialized())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if "_cuda_getDeviceCount" in run.stderr:
        pytest.skip("this torch has no CUDA")
    assert run.stdout.split() == ["True", "False", "False"], run.stderr
