"""Groups on the mpi backend: parts of the world, the store, programs that need one import."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from tests.support.on_ranks import on
from tests.support.ranks import mpirun


@pytest.mark.slow
@pytest.mark.skipif(mpi.BACKEND != "mpi", reason="this torch has monitored_barrier for gloo alone")
@on("mpi-3")
def test_monitored_barrier_names_who_is_missing(world):
    dist.monitored_barrier()
    group = dist.new_group()
    if world.rank < 2:
        with pytest.raises(RuntimeError, match="Rank 2 failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


@pytest.mark.slow
def test_a_program_of_the_users_own_needs_one_import():
    """Ranks and a store come from MPI alone, whatever else the environment says."""
    # Where nothing is recorded the recorder's size does no harm.
    size = {"TORCH_FR_BUFFER_SIZE": "100"} if torch.__version__ < "2.15" else {}
    result = mpirun(
        2,
        """
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        ours = ddp_from_scratch.mpi.BACKEND
        cases = [("gloo", "mpi://"), (ours, "mpi://")]
        if ours == "mpi":  # where torch lets a backend take the name; see mpi/__init__.py
            cases += [("mpi", None)] * 2  # a second time after the first was destroyed
        for backend, method in cases:
            dist.init_process_group(backend, init_method=method)
            tensor = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(tensor)
            assert (dist.get_backend(), dist.get_world_size(), tensor.item()) == (backend, 2, 3)
            dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
            assert tensor.item() == 6
            dist.destroy_process_group()
        """,
        **{"RANK": "7", "WORLD_SIZE": "9", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        **size,
    )
    assert result.returncode == 0, result.stderr


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


@pytest.mark.slow
def test_mpi_that_was_not_started_with_threads_is_one_line():
    setting = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI"
    result = mpirun(1, f"{setting}; import ddp_from_scratch.mpi")
    assert result.returncode == 1, result.stderr
    assert "needs MPI_THREAD_MULTIPLE; this MPI gave level" in result.stderr
