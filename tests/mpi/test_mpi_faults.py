"""What a user sees when a rank of a program on the mpi backend fails, and how the job ends."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.ranks import CALL_LIMIT_S, MPIRUN, mpirun
from tests.support.tiers import slow

BEGIN = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, ddp_from_scratch as ddp
from ddp_from_scratch import mpi
ddp.process_group("mpi", timeout={timeout}).__enter__()
rank = dist.get_rank()
dist.barrier()
"""


def run(world_size, program, timeout=100.0):
    return mpirun(world_size, BEGIN.format(timeout=timeout) + program)


@pytest.mark.parametrize(
    "ending",
    [
        slow(""),
        slow("dist.destroy_process_group()"),
        slow("if rank: dist.destroy_process_group()"),
        "window = mpi.empty(100); dist.all_reduce(window)",
        slow("time.sleep(2 * rank)"),
    ],
)
def test_the_exit_code_is_0_whether_or_not_the_group_was_destroyed(ending):
    result = run(2, ending)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_an_exception_in_one_rank_ends_the_job():
    """Though rank 0 waits in a collective, and rank 1 has one under way."""
    result = run(
        2,
        """
if rank == 1:
    dist.all_reduce(torch.ones(1), async_op=True)
    raise KeyError("mine")
dist.all_reduce(torch.ones(1))
dist.barrier()
""",
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("KeyError: 'mine'") == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_ends_the_job(victim):
    result = run(3, f"if rank == {victim}: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(9))")
    assert result.returncode != 0
    assert "signal 9" in result.stdout + result.stderr


@pytest.mark.parametrize("ending", ["sys.exit(3)", slow("sys.exit(0)")])
def test_a_rank_that_ends_early_is_named_long_before_the_timeout(ending):
    """Its own exit waits in MPI_Finalize for the others, so the launcher hears nothing."""
    result = run(3, f"if rank == 1: {ending}\ndist.all_reduce(torch.ones(9))")
    assert result.returncode == 1, result.stderr
    assert "failed: rank 1 ended without coming to it" in result.stderr


@pytest.mark.slow
def test_mpi_abort_ends_the_job_with_its_code():
    result = run(
        2, "if rank == 1: mpi.runtime.MPI.COMM_WORLD.Abort(7)\ndist.all_reduce(torch.ones(9))"
    )
    assert result.returncode == 7, result.stderr


SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "
TRAINS = """
torch.manual_seed(0)
model = torch.nn.Linear(5000, 5000)  # 100 MB
reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
optimizer.backward_and_step(model(torch.ones(1, 5000)).sum())
dist.barrier()
assert torch.isfinite(model.weight).all()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root, and unshare"
)
def test_gradients_that_dev_shm_cannot_hold(tmp_path):
    """It waited for the whole timeout, and ended."""
    program = tmp_path / "program.py"
    program.write_text(BEGIN.format(timeout=20) + TRAINS)
    command = f"{SMALL}mpirun -n 2 {sys.executable} {program}"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
        timeout=CALL_LIMIT_S,
    )
    if "unshare failed" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"cannot mount: {result.stderr}")
    assert (result.returncode, result.stderr) == (0, "")
