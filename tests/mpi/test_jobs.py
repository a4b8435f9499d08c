"""How a job on the mpi backend ends: the exit code, what it says, and which files are left."""

import sys

import pytest

from tests.support.failing_run import Run
from tests.support.tiers import slow

PROGRAM = """
import os, sys
import torch, torch.distributed as dist, ddp_from_scratch as ddp
from ddp_from_scratch import mpi
ddp.process_group("mpi", timeout=100.0).__enter__()
rank, tensor = dist.get_rank(), torch.ones(1)
dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))  # meets through the same store
dist.barrier()
{ending}
"""
RAISES = """
if rank == 1:
    dist.all_reduce(torch.ones(1), async_op=True)
    raise KeyError("mine")
dist.all_reduce(torch.ones(1))
dist.barrier()
"""
# A rank's own exit waits in MPI_Finalize for the others, so the launcher hears nothing.
EARLY = "failed: rank 1 ended without coming to it"
KILLED = "if rank == 0: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(9))"
ENDINGS = {
    "raises": (RAISES, 1, "KeyError: 'mine'"),
    "killed 0": (KILLED, 137, ""),
    "a window": ("window = mpi.empty(100); dist.all_reduce(window)", 0, ""),
    "ends early": ("if rank == 1: sys.exit(3)\ndist.all_reduce(torch.ones(9))", 1, EARLY),
    "destroyed by one": ("if rank: dist.destroy_process_group()", 0, ""),
    "aborts": (
        "if rank == 1: mpi.MPI.COMM_WORLD.Abort(7)\ndist.all_reduce(torch.ones(9))",
        *(7, ""),
    ),
}


@pytest.mark.parametrize("ending", [e if e == "raises" else slow(e) for e in ENDINGS])
def test_how_a_job_ends(ending, tmp_path):
    text, code, told = ENDINGS[ending]
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM.format(ending=text))
    command = "mpirun", "-n", "2", sys.executable, str(tmp_path / "program.py")
    with Run(*command, TMPDIR=str(tmp_path / "tmp")) as run:
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        if code == 0:
            assert run.err == ""
        else:
            assert run.err.count(told) == 1 or not told, run.text
    assert list((tmp_path / "tmp").rglob("ddp-*")) == []
