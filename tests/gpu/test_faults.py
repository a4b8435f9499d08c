"""Programs on a simulated GPU that an earlier version of the library broke."""

import torch
from torch import nn

import ddp_from_scratch as ddp
from tests.support.fuzz_case import watched


def step(module):
    module(torch.randn(4, 8).to("cuda")).square().mean().backward()


def late_loss(world):
    from ddp_from_scratch.training.coordination import LossWatch, as_number

    watch = LossWatch(world.rank, world.device)
    nan, good = (torch.tensor(loss).to("cuda") for loss in (float("nan"), 1.0))
    watch.see(nan, 5)
    early = watch.known()
    watch.see(good, 6)
    return early, watch.known() == watch.settled() == as_number(5, world.rank)


def test_a_loss_that_is_not_finite_is_known_when_the_copy_has_arrived(nccl2):
    assert nccl2(late_loss) == [(0, True)] * 2


def uneven_batches(world):
    from tests.support.simgpu import trace

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to("cuda")
    reducer = ddp.Reducer(module, broadcast_buffers=True)
    with watched(world.device) as faults, ddp.join(reducer):
        for _ in range(2 + world.rank):
            step(module)
        waits = [wait for wait in trace.host_waits() if "torch_ddp/join.py" in wait]
    reducer.remove()
    return faults, waits


def test_join_does_not_wait_for_the_gpu_while_there_is_data(sim):
    assert sim(uneven_batches) == [([], [])] * 2
