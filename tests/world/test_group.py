"""Calls without a process group, or with something else in its place: one clear error."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from tests.support.ranks import ROOT, mpirun

CALLS = {
    "Reducer": ddp.Reducer,
    "DistributedDataParallel": ddp.DistributedDataParallel,
    "broadcast_parameters": ddp.broadcast_parameters,
    "broadcast_buffers": ddp.broadcast_buffers,
    "check_sync": ddp.check_sync,
}


@pytest.mark.parametrize("name", CALLS)
def test_without_a_process_group(name):
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"no process group is open: .* ddp.process_group\("):
        CALLS[name](nn.Linear(1, 1))


def by_position(world):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"must be .* or None, got list; .* is given by name"):
        ddp.check_sync(model, [optimizer])
    with pytest.raises(TypeError, match=r"must be .* or None, got int; .* is given by name"):
        ddp.Reducer(model, 25)
    with pytest.raises(TypeError, match="got str"):
        ddp.broadcast_parameters(model, 0, "gloo")
    ddp.check_sync(model, optimizers=[optimizer], ignore=["weight", "bias"])


def test_options_by_position(ranks):
    ranks("gloo", 2)(by_position)


def of_others(world):
    group, own = dist.new_group([0]), dist.new_group([1])
    if world.rank:
        for call in CALLS.values():
            arguments = (0, group) if "broadcast" in call.__name__ else (group,)
            if call is ddp.DistributedDataParallel:
                continue
            with pytest.raises(ValueError, match="this rank is not a member of the process group"):
                call(nn.Linear(1, 1), *arguments)
        with pytest.raises(ValueError, match="not a member"):
            ddp.DistributedDataParallel(nn.Linear(1, 1), process_group=group)
        reducer = ddp.Reducer(nn.Linear(1, 1), own)
        reducer.register_comm_hook(group, ddp.comm_hooks.allreduce_hook)
        with pytest.raises(
            ValueError, match=r"not a member|Invalid process group"
        ):  # torch's words
            reducer.module(torch.ones(1)).backward()


def test_a_group_of_others(ranks):
    ranks("gloo", 2)(of_others)


AGAIN = """
    import torch
    import ddp_from_scratch as ddp

    for attempt in range(3):
        try:
            with ddp.process_group(BACKEND) as world:
                model = torch.nn.Linear(1, 1)
                ddp.Reducer(model)
                model(torch.ones(1)).backward()
                if attempt < 2:
                    1 / 0
                print("done in attempt", attempt)
        except ZeroDivisionError:
            pass
    """


def test_a_notebook_tries_again():
    program = textwrap.dedent(AGAIN).replace("BACKEND", '"gloo"')
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "done in attempt 2\n", done.stderr


@pytest.mark.slow
def test_a_notebook_tries_again_on_mpi():
    done = mpirun(1, AGAIN.replace("BACKEND", '"mpi"'), PYTHONPATH=str(ROOT))
    assert done.stdout == "done in attempt 2\n", done.stderr
