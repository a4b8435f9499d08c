"""How a job on the mpi backend ends: the exit code, what it says, and which files are left."""

import os
import shutil
import sys

import pytest

from tests.support.failing_run import Run
from tests.support.tiers import slow

PROGRAM = """
import os, sys
import torch, torch.distributed as dist, ddp_from_scratch as ddp
from ddp_from_scratch import mpi
ddp.process_group("mpi", timeout={timeout}).__enter__()
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
TRAINS = """
torch.manual_seed(0)
model = torch.nn.Linear(3000, 3000)  # 36 MB
reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, reducer=reducer)
optimizer.backward_and_step(model(torch.ones(1, 3000)).sum())
dist.barrier()
assert torch.isfinite(model.weight).all()
"""
# A rank's own exit waits in MPI_Finalize for the others, so the launcher hears nothing.
EARLY = "failed: rank 1 ended without coming to it"
KILLED = "if rank == 0: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(9))"
ENDINGS = {
    "a window": ("window = mpi.empty(100); dist.all_reduce(window)", 0, ""),
    "raises": (RAISES, 1, "KeyError: 'mine'"),
    "killed 0": (KILLED, 137, ""),
}
SLOW = {
    "ends early": ("if rank == 1: sys.exit(3)\ndist.all_reduce(torch.ones(9))", 1, EARLY),
    "destroyed by one": ("if rank: dist.destroy_process_group()", 0, ""),
    "ends early with 0": ("if rank == 1: sys.exit(0)\ndist.all_reduce(torch.ones(9))", 1, EARLY),
    "aborts": (
        "if rank == 1: mpi.runtime.MPI.COMM_WORLD.Abort(7)\ndist.all_reduce(torch.ones(9))",
        *(7, ""),
    ),
}


def write(folder, ending, timeout=100.0):
    (folder / "tmp").mkdir()
    (folder / "program.py").write_text(PROGRAM.format(timeout=timeout, ending=ending))
    return "mpirun", "-n", "2", sys.executable, str(folder / "program.py")


@pytest.mark.parametrize("ending", [*ENDINGS, *map(slow, SLOW)])
def test_how_a_job_ends(ending, tmp_path):
    text, code, told = (ENDINGS | SLOW)[ending]
    with Run(*write(tmp_path, text), TMPDIR=str(tmp_path / "tmp")) as run:
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        if code == 0:
            assert run.err == ""
        else:
            assert run.err.count(told) == 1 or not told, run.text
    assert list((tmp_path / "tmp").rglob("ddp-*")) == []


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root, and unshare"
)
def test_gradients_that_dev_shm_cannot_hold(tmp_path):
    """Open MPI itself needs 32 MB. The job waited for the whole timeout once, and ended."""
    command = " ".join(write(tmp_path, TRAINS, timeout=20))
    mount = "mount -t tmpfs -o size=32m none /dev/shm"
    with Run("unshare", "-m", "sh", "-c", f"{mount} && {command} && ls /dev/shm") as run:
        code = run.wait()
        if "unshare failed" in run.err or "mount:" in run.err:
            pytest.skip(f"cannot mount: {run.err}")
        assert (code, run.out, run.err) == (0, "", "")
