"""What belongs to GPUs and can be shown without one, real or simulated."""

import subprocess
import sys
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.launch import rank_process
from ddp_from_scratch.watch import recorder


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
    clock = recorder.Marks(torch.device("cuda", 0))
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


# What a rank prints when NCCL fails: who has failed, and NCCL's own reason -----------------------

FULL_SHM = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error \
(run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error: failed to extend /dev/shm/nccl-7aXkQe to 33030532 bytes, error: No space left on device (28)
"""
PEER_GONE = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or \
there was a network error, NCCL version 2.30.7
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
socketProgress: Connection closed by remote peer 10.0.0.2<47311>
"""


LOST = "error: rank 3 lost the other ranks: NCCL"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            FULL_SHM,
            "error: rank 3: NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.30.7. Last error: failed to extend /dev/shm/nccl-7aXkQe to 33030532 "
            "bytes, error: No space left on device (28)\n",
        ),
        (PEER_GONE, LOST),
        ("NCCL watchdog: remote error", LOST),
    ],
)
def test_a_failure_of_nccl_is_the_ranks_own_or_a_lost_peer(monkeypatch, capfd, text, expected):
    monkeypatch.setattr(rank_process.os, "_exit", sys.exit)
    monkeypatch.setattr(rank_process.time, "sleep", lambda seconds: None)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        rank_process.run_to_exit(Mock(side_effect=dist.DistBackendError(text)))
    assert ended.value.code == 1
    told = capfd.readouterr().err
    assert told.startswith(expected)
    assert told.count("\n") == 1
