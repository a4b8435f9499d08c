"""Groups on the mpi backend: parts of the world, the store, programs that need one import."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from tests.support.ranks import mpirun


def monitored_barrier(world):
    dist.monitored_barrier()
    group = dist.new_group()
    last = world.world_size - 1
    if world.rank != last:
        with pytest.raises(RuntimeError, match=rf"Rank {last} failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


def test_monitored_barrier_names_who_is_missing(crew):
    if mpi.BACKEND != "mpi":
        pytest.skip(f"torch {torch.__version__} has monitored_barrier for gloo alone")
    crew(monitored_barrier)


def subgroups_of_one(world):
    alone, _ = dist.new_subgroups(group_size=1)
    tensor = torch.tensor([world.rank + 1.0])
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == world.rank + 1


def test_new_subgroups(crew):
    crew(subgroups_of_one)


def a_group_that_is_split(world):
    n, r = world.world_size, world.rank
    odd = dist.split_group(split_ranks=[list(range(0, n, 2)), list(range(1, n, 2))])
    tensor = torch.tensor([r])
    dist.all_reduce(tensor, group=odd)
    assert tensor.item() == sum(range(r % 2, n, 2))
    assert dist.get_process_group_ranks(odd) == list(range(r % 2, n, 2))
    last = dist.split_group(split_ranks=[[n - 1]])
    assert (
        dist.get_world_size(last) == 1 if r == n - 1 else last == dist.GroupMember.NON_GROUP_MEMBER
    )


def test_split_group(crew):
    if torch.__version__ < "2.15":
        pytest.skip(f"torch {torch.__version__} splits groups only where there is a GPU")
    crew(a_group_that_is_split)


def subgroups(world):
    even = dist.new_group([r for r in range(world.world_size) if r % 2 == 0])
    last = dist.new_group([world.world_size - 1, 0])
    if world.rank % 2 == 0:
        tensor = torch.tensor([world.rank + 1])
        dist.all_reduce(tensor, group=even)
        assert tensor.item() == sum(r + 1 for r in range(world.world_size) if r % 2 == 0)
    if world.rank in (0, world.world_size - 1):
        tensor = torch.tensor([world.rank])
        dist.broadcast(tensor, src=world.world_size - 1, group=last)
        assert tensor.item() == world.world_size - 1
        dist.destroy_process_group(last)
    if world.rank % 2 == 0:
        dist.destroy_process_group(even)


def test_subgroups_where_only_members_call(crew):
    crew(subgroups)


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


@pytest.mark.slow
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


def a_store_that_rank_0_leaves(world):
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


def test_a_store_outlives_the_rank_that_made_it(ranks):
    ranks("mpi", 2)(a_store_that_rank_0_leaves)


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
