"""Registration of the mpi backend, its rendezvous and store, in programs of a user's own."""

import gc
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from tests.support.ranks import mpirun


def test_a_program_of_the_users_own_needs_one_import():
    """Where torch lets a backend take the name; see mpi/__init__.py. Ranks come from MPI alone."""
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} keeps the name mpi for itself")
    result = mpirun(
        2,
        """
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        for _ in range(2):  # a second time after the first was destroyed
            dist.init_process_group("mpi")
            tensor = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(tensor)
            assert (dist.get_backend(), dist.get_world_size(), tensor.item()) == ("mpi", 2, 3)
            dist.destroy_process_group()
        """,
        RANK="7",
        WORLD_SIZE="9",
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert result.returncode == 0, result.stderr


def test_torch_says_that_the_backend_is_there():
    """Under the name by which `init_process_group` finds it. Once imported, never undone."""
    assert dist.is_backend_available(mpi.BACKEND)
    assert dist.is_backend_available(f"cpu:{mpi.BACKEND}")
    assert dist.is_mpi_available() == (mpi.BACKEND == "mpi")


@pytest.mark.parametrize("backend", ["mpi", None])
def test_accelerate_takes_it_under_mpirun(backend):
    pytest.importorskip("accelerate")
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} keeps the name mpi for itself")
    result = mpirun(
        2,
        f"""
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        from accelerate import Accelerator, InitProcessGroupKwargs
        accelerator = Accelerator(
            cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend={backend!r})]
        )
        gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
        assert (dist.get_backend(), gathered.tolist()) == ("mpi", [0, 1])
        dist.destroy_process_group()
        """,
        OMP_NUM_THREADS="1",
    )
    assert result.returncode == 0, result.stderr


def test_ranks_and_a_store_come_from_mpi_by_any_name():
    result = mpirun(
        2,
        """
        import torch, torch.distributed as dist, ddp_from_scratch.mpi
        for backend in ("gloo", ddp_from_scratch.mpi.BACKEND):
            dist.init_process_group(backend, init_method="mpi://")
            tensor = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
            assert (dist.get_backend(), dist.get_world_size(), tensor.item()) == (backend, 2, 3)
            dist.destroy_process_group()
        """,
    )
    assert result.returncode == 0, result.stderr


def a_store_that_nobody_uses(world):
    store = mpi.store(mpi.placement(), timedelta(seconds=20))
    store.set(f"rank {world.rank}", "there")
    store.wait([f"rank {rank}" for rank in range(world.world_size)])
    file = Path(store.path)
    dist.barrier()
    before = file.read_bytes()
    dist.barrier()
    del store
    gc.collect()
    dist.barrier()
    assert file.read_bytes() == before


def test_a_store_leaves_its_file_alone_at_the_end(ranks):
    """Rank 0 removes it, and one that wrote to it then left the next rank reading nonsense."""
    ranks("mpi", 2)(a_store_that_nobody_uses)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("thread_level = 'serialized'", "needs MPI_THREAD_MULTIPLE; this MPI gave level"),
        ("initialize = False", "mpi4py.rc.initialize is off and MPI has not been started: call"),
    ],
)
def test_mpi_that_was_not_started_with_threads_is_one_line(setting, error):
    result = mpirun(
        1,
        f"import mpi4py; mpi4py.rc.{setting}; from mpi4py import MPI; import ddp_from_scratch.mpi",
    )
    assert result.returncode == 1, result.stderr
    assert error in result.stderr
