"""What only the mpi backend has: its store, how its jobs end, and messages between two ranks."""

import gc
import subprocess
import sys
import threading
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from ddp_from_scratch.backend.mpi_start import ending
from tests.support.failing_run import Run
from tests.support.on_ranks import on
from tests.support.tiers import slow

OF_A_USER = """
import torch, torch.distributed as dist, ddp_from_scratch.mpi
ours = ddp_from_scratch.mpi.BACKEND
cases = [("gloo", "mpi://"), (ours, "mpi://")]
if ours == "mpi":  # where torch lets a backend take the name; see mpi.py
    cases += [("mpi", None)] * 2  # a second time after the first was destroyed
for backend, method in cases:
    dist.init_process_group(backend, init_method=method)
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    assert (dist.get_backend(), dist.get_world_size(), tensor.item()) == (backend, 2, 3)
    dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
    assert tensor.item() == 6
    dist.destroy_process_group()
"""


def test_the_thread_that_ends_a_late_start_is_gone_after_a_start_in_time():
    before = threading.enumerate()
    with ending("rank 0", timedelta(seconds=60), lambda: "the others"):
        assert len(threading.enumerate()) == len(before) + 1
    assert threading.enumerate() == before


@pytest.mark.program
@pytest.mark.slow
def test_a_program_of_the_users_own_needs_one_import():
    """Ranks and a store come from MPI alone, whatever else the environment says."""
    environ = {"RANK": "7", "WORLD_SIZE": "9", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    environ["TORCH_FR_BUFFER_SIZE"] = "100"  # an mpi group is not recorded, and works
    with Run("mpirun", "-n", "2", sys.executable, "-c", OF_A_USER, **environ) as run:
        assert run.wait() == 0, run.text


@on("mpi-2")
def test_a_store_outlives_the_rank_that_made_it(world):
    store = mpi.store(mpi.placement(), timedelta(seconds=20))
    store.set(f"rank {world.rank}", "there")
    store.wait([f"rank {rank}" for rank in range(world.world_size)])
    dist.barrier()
    if world.rank == 0:
        del store
        gc.collect()
    dist.barrier()
    if world.rank == 1:
        store.set("rank 1", "still there")
        assert (store.get("rank 0"), store.get("rank 1")) == (b"there", b"still there")


PROGRAM = """
import os, sys
import torch, torch.distributed as dist, ddp_from_scratch as ddp
from ddp_from_scratch import mpi
from ddp_from_scratch.backend.mpi_start import ending
world = ddp.process_group("mpi", timeout=100.0)
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
EARLY = "failed: rank 1 ended without reaching it"
KILLED = "if rank == 0: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(9))"
ENDINGS = {
    "raises": (RAISES, 1, "KeyError: 'mine'"),
    "killed 0": (KILLED, 137, ""),
    "a window": ("window = mpi.empty(100); dist.all_reduce(window)", 0, ""),
    "ends early": (  # in the block, since a group is closed at exit otherwise
        "with world:\n    if rank == 1: sys.exit(3)\n    dist.all_reduce(torch.ones(9))",
        *(1, EARLY),
    ),
    "a thread is left": (
        "import threading\nif rank == 1:\n"
        "    threading.Thread(target=threading.Event().wait, args=(100,)).start()\n"
        "    sys.exit(3)\ndist.all_reduce(torch.ones(9))",
        *(1, EARLY),
    ),
    "destroyed by one": ("if rank: dist.destroy_process_group()", 0, ""),
    "aborts": (
        "if rank == 1: mpi.MPI.COMM_WORLD.Abort(7)\ndist.all_reduce(torch.ones(9))",
        *(7, ""),
    ),
}


@cache
def is_mpi(name: str) -> bool:
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    return name in told.stdout


def code_of_mpirun(code: int) -> int:
    """After a rank's exit code; Intel MPI's has its own where it kills the other ranks."""
    return 255 if code and is_mpi("Intel") else code


@pytest.mark.program
@pytest.mark.parametrize("ending", [e if e == "raises" else slow(e) for e in ENDINGS])
def test_how_a_job_ends(ending, tmp_path):
    text, code, told = ENDINGS[ending]
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM.format(ending=text))
    command = "mpirun", "-n", "2", sys.executable, str(tmp_path / "program.py")
    with Run(*command, TMPDIR=str(tmp_path / "tmp")) as run:
        assert run.wait() == (code if ending == "aborts" else code_of_mpirun(code)), run.text
        run.assert_nobody_left()
        if code == 0:
            assert run.err == ""
        else:
            assert run.err.count(told) == 1 or not told, run.text
    assert list((tmp_path / "tmp").rglob("ddp-*")) == []


NEVER = """
import os, signal, sys
import ddp_from_scratch as ddp
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    signal.pause()
with ddp.process_group(sys.argv[1], timeout=1.0):
    pass
"""


@pytest.mark.program
@pytest.mark.parametrize("backend", [slow("mpi"), slow("gloo")])
def test_a_rank_that_never_comes(backend):
    """MPI itself would wait for it for ever."""
    with Run("mpirun", "-n", "2", sys.executable, "-c", NEVER, backend) as run:
        assert run.wait() == code_of_mpirun(2), run.text
        told = "rank 0 waited 1 s, its timeout, for all 2 ranks to open their group: not all have "
        assert told + "started; missing: [1]" in run.err
        run.assert_nobody_left()


NO_NEW_GROUP = """
import signal
from datetime import timedelta
import torch.distributed as dist
import ddp_from_scratch as ddp
with ddp.process_group("mpi", timeout=100.0) as world:
    if world.rank == 1:
        signal.pause()
    dist.new_group([0, 1], timeout=timedelta(seconds=1))
"""


@pytest.mark.program
@pytest.mark.slow
def test_a_rank_that_makes_no_new_group():
    with Run("mpirun", "-n", "2", sys.executable, "-c", NO_NEW_GROUP) as run:
        assert run.wait() == code_of_mpirun(2), run.text
        told = "rank 0 waited 1 s, its timeout, for ranks [0, 1] to make a group: not all have "
        assert told + "called new_group or split_group" in run.err
        run.assert_nobody_left()


@pytest.mark.program
@pytest.mark.parametrize("finalizes", ["0", slow("1")])
def test_mpi_is_finalized_unless_mpi4pys_variable_says_no(finalizes):
    """Open MPI's mpirun reports a rank that has started MPI and ends without finalizing it."""
    program = 'import ddp_from_scratch as ddp; ddp.process_group("mpi")'
    command = "mpirun", "-n", "1", sys.executable, "-c", program
    with Run(*command, MPI4PY_RC_FINALIZE=finalizes) as run:
        assert (run.wait() == 0) == (finalizes == "1" or not is_mpi("Open MPI")), run.text


OF_WORKERS = """
import multiprocessing, subprocess, sys
import ddp_from_scratch.mpi
def started():
    return "mpi4py.MPI" in sys.modules
if __name__ == "__main__":
    import ddp_from_scratch as ddp
    with ddp.process_group("mpi", timeout=100.0) as world:
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            assert (started(), pool.apply(started)) == (True, sys.argv[1] == "fork")
        here = "import sys, ddp_from_scratch.mpi; sys.exit('mpi4py.MPI' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", here]).returncode == 0
"""


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_start_no_mpi(method, tmp_path):
    """They import their program again, below mpirun, where an MPI of their own would wait."""
    (tmp_path / "program.py").write_text(OF_WORKERS)
    with Run("mpirun", "-n", "2", sys.executable, str(tmp_path / "program.py"), method) as run:
        assert run.wait(120.0) == 0, run.text


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.parametrize("level", ["multiple", "single"])
def test_a_program_that_has_started_mpi(level):
    code = f"""
import mpi4py
mpi4py.rc.thread_level = "{level}"
import ddp_from_scratch.mpi
from mpi4py import MPI
import ddp_from_scratch as ddp
with ddp.process_group("mpi", timeout=100.0) as world:
    assert world.rank == MPI.COMM_WORLD.rank
"""
    with Run("mpirun", "-n", "2", sys.executable, "-c", code) as run:
        assert run.wait() == (0 if level == "multiple" else 1), run.text
        assert ("needs MPI_THREAD_MULTIPLE" in run.err) == (level == "single")


@on("mpi-2")
def test_messages_while_their_sender_sleeps(world):
    """MPI moves some only while their sender is in MPI, and it sleeps there until all arrive."""
    handles = []
    for size in (1000, 5000, 100_000, 1_000_000):
        for count in (1, 20, 200):
            tensor = torch.zeros(size, dtype=torch.uint8)
            if world.rank == 0:
                handles += [dist.isend(tensor, dst=1) for _ in range(count)]
            if world.rank == 1:
                for _ in range(count):
                    dist.recv(tensor, src=0)
            dist.all_reduce(torch.ones(5), async_op=count == 20)
    for handle in handles:
        handle.wait()
    dist.barrier()


@on("mpi-2")
def test_messages_that_do_not_fit(world):
    if world.rank == 0:
        for size in (10, 5, 10):
            dist.send(torch.ones(size), dst=1)
        return
    # MPI reports a larger one where it arrives.
    told = r"recv from rank 0 on rank 1 .* failed.*(?i:truncated)"
    with pytest.raises(RuntimeError, match=told):
        dist.recv(torch.ones(5), src=0)
    # A smaller one it takes: the rest would stay as it was.
    received = torch.zeros(10)
    handle = dist.irecv(received, src=0)
    with pytest.raises(RuntimeError, match=r"recv from rank 0 .*: 20 bytes came, expected 40$"):
        handle.wait()
    assert not handle.is_success()
    dist.recv(received, src=0)
    assert received.eq(1).all()
