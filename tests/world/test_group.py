"""A process group is opened, closed and opened again; without one there is one clear error."""

import os
import sys
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from tests.support.failing_run import LAUNCHERS, Run
from tests.support.on_ranks import on
from tests.support.refusal import refusal
from tests.support.tiers import slow

CALLS = [ddp.Reducer, ddp.DistributedDataParallel, ddp.check_sync]
CALLS += [ddp.broadcast_parameters, ddp.broadcast_buffers]


def test_without_a_process_group():
    assert not dist.is_initialized()
    for call in CALLS:
        with pytest.raises(RuntimeError, match=r"no process group is open: .* ddp.process_group\("):
            call(nn.Linear(1, 1))


@on("gloo-2")
def test_a_group_of_others(world):
    group, own = dist.new_group([0]), dist.new_group([1])
    if world.rank == 0:
        return
    for call in CALLS:
        options = {"process_group": group} if call is ddp.DistributedDataParallel else {}
        rest = (0, group) if "broadcast" in call.__name__ else () if options else (group,)
        with pytest.raises(ValueError, match="not a member of the process group"):
            call(nn.Linear(1, 1), *rest, **options)
    reducer = ddp.Reducer(nn.Linear(1, 1), own)
    reducer.register_comm_hook(group, ddp.comm_hooks.allreduce_hook)
    with pytest.raises(ValueError, match=r"not a member|Invalid process group"):  # torch's words
        reducer.module(torch.ones(1)).backward()


def test_a_second_call_returns_the_same_world_until_it_is_closed():
    first = ddp.process_group("gloo")
    assert ddp.process_group("gloo") is first
    with ddp.process_group("gloo") as world:  # from here on it is closed by the block
        assert world is first
        # A group that a block closes is nobody else's: torch says so, as ever.
        with pytest.raises(ValueError, match="twice"):
            ddp.process_group("gloo")
    assert not dist.is_initialized()
    with suppress(ZeroDivisionError), ddp.process_group("gloo"):
        raise ZeroDivisionError  # as in a notebook
    assert not dist.is_initialized()
    first = ddp.process_group("gloo")
    dist.destroy_process_group()  # by hand
    with ddp.process_group("gloo") as second:
        assert second is not first
        assert second == first
    assert not dist.is_initialized()


def connect_late(folder):
    initialise, connected = dist.init_process_group, Path(folder, "connected")

    def slow(*arguments, **options):
        initialise(*arguments, **options)
        time.sleep(0.5)  # makes the mistake certain; the test passes whatever it is
        connected.touch()

    if os.environ["RANK"] == "2":
        dist.init_process_group = slow
    with ddp.process_group("gloo"):
        assert connected.exists()


@pytest.mark.program
@pytest.mark.slow
def test_no_rank_begins_before_all_are_connected(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # a module's function needs none
    assert ddp.start_ranks(partial(connect_late, str(tmp_path)), [3]) == 0


PROGRAM = """
    import atexit
    import glob
    import pathlib
    import weakref

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp

    def threads():
        names = [pathlib.Path(name).read_text() for name in glob.glob("/proc/self/task/*/comm")]
        return sum("gloo" in name for name in names)

    def train(joins):
        global group, model, optimizer, reducer  # alive behind the group's end
        group = weakref.ref(dist.group.WORLD)
        model = torch.nn.Linear(3, 3)
        if joins:
            model = ddp.DistributedDataParallel(model)
        reducer = model.reducer if joins else ddp.Reducer(model, stall_after=30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with ddp.join(reducer, enable=joins):
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert threads() > 0

    for joins in (True, False):
        with ddp.process_group("gloo"):
            train(joins)
        assert group() is None, "somebody holds the group"
        assert threads() == 0, "gloo's threads live on"
    atexit.register(lambda: print(f"open at exit: {dist.is_initialized()}\\n", end=""))
    world = ddp.process_group("gloo")  # its handler runs before the one above
    assert ddp.process_group("gloo") is world
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("launcher", "ranks"), [("none", 1), ("start_ranks", 2)])
def test_a_group_leaves_nothing_is_opened_again_and_closed_at_exit(launcher, ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with Run(*LAUNCHERS[launcher], str(program)) as run:
        assert (run.wait(), run.out) == (0, "open at exit: False\n" * ranks), run.text


FORKS = """
    import multiprocessing
    import os
    import sys

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp

    def run(world):
        model = torch.nn.Linear(3, 3)
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model)
        for code in (3, 0):
            model(torch.ones(1, 3)).sum().backward()
            child = os.fork()
            if child == 0:
                try:
                    reducer.average_gradients()
                except RuntimeError as error:
                    assert "this process was forked from a rank" in str(error), error
                else:
                    sys.exit(4)
                if code:
                    sys.exit(code)
                return
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == code
            dist.barrier()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map(abs, [-1]) == [1]
        reducer.average_gradients()
        print(f"end {world.rank}\\n", end="", flush=True)

    if sys.argv[2:]:
        with ddp.process_group(sys.argv[1], timeout=30) as world:
            run(world)
    else:
        run(ddp.process_group(sys.argv[1], timeout=30))
"""


@pytest.mark.program
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shares memory")
@pytest.mark.parametrize("block", [True, slow(False)])
@pytest.mark.parametrize(
    ("launcher", "backend"), [slow("start_ranks", "gloo"), slow("mpirun", "mpi")]
)
def test_a_process_that_a_rank_forks_leaves_the_group_alone(launcher, backend, block, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(FORKS))
    with Run(*LAUNCHERS[launcher], str(program), backend, *["block"] * block) as run:
        assert run.wait() == 0, run.text
        assert sorted(run.out.splitlines()) == ["end 0", "end 1"]


USES_MPI_IN_A_FORK = """
    import os

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp

    with ddp.process_group("mpi", timeout=30) as world:
        other, tensor = 1 - world.rank, torch.ones(1)
        child = os.fork()
        if child == 0:
            calls = (dist.send, tensor, other), (dist.recv, tensor, other), (dist.new_group, [0, 1])
            for call, *arguments in calls:
                try:
                    call(*arguments)
                except RuntimeError as error:
                    assert "this process was forked from a rank" in str(error), error
                else:
                    raise SystemExit(4)
            dist.destroy_process_group()
            raise SystemExit(3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
        assert tensor.item() == 2
"""


@pytest.mark.program
@pytest.mark.slow
def test_a_process_that_a_rank_forks_cannot_use_its_mpi(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(USES_MPI_IN_A_FORK))
    with Run(*LAUNCHERS["mpirun"], str(program)) as run:
        assert run.wait() == 0, run.text


def test_a_torch_without_nccl_leads_to_the_backends_for_cpus(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "nccl")
    told = refusal(ddp.process_group, "nccl")
    assert told.startswith("this build of torch has no nccl: use gloo or mpi, or on a machine with")
