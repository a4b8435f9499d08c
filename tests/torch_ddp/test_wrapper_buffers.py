"""Buffers of the wrapped module, and forward passes on one rank alone."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddp_from_scratch import DistributedDataParallel as Ours
from tests.torch_ddp.test_distributed_data_parallel import Net


class Buffered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1))
        self.register_buffer("b", torch.full((2,), value))

    def forward(self):
        seen = self.b.clone()
        self.b += 1
        return (self.p * seen).sum()


def buffers_follow_rank_0(world):
    model = Ours(Buffered(10.0 + world.rank))
    assert model.module.b.tolist() == [10, 10]
    model.module.b += 5 * world.rank
    model().backward()
    assert model.module.b.tolist() == [11, 11]
    model.module.b = torch.full((2,), 3.0 + world.rank)  # another tensor
    model().backward()
    assert model.module.b.tolist() == [4, 4]
    one, two = model(), model()  # the second does not spoil the first one's backward
    one.backward(), two.backward()


def test_buffers_are_rank_0s_in_every_forward_that_trains(crew):
    crew(buffers_follow_rank_0)


class Halves(Buffered):
    def __init__(self, value):
        super().__init__(value)
        self.q = nn.Parameter(torch.zeros(1))

    def forward(self, both=True):
        return super().forward() + (self.q.sum() if both else 0)


def missing_on_one_rank(world):
    """Rank 0 waits for rank 1 in vain, and rank 1 must not wait for rank 0's buffers."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = Ours(Halves(1.0), process_group=group)
    if world.rank == 0:
        with pytest.raises(RuntimeError):
            model().backward()
    else:
        model(both=False).backward()
        with pytest.raises(RuntimeError, match="pass on rank 1 for: q"):
            model()
    dist.barrier()
    dist.destroy_process_group(group)


def test_parameter_without_gradient_on_one_rank_is_named_there_before_buffers_are_sent(ranks):
    ranks("gloo", 2)(missing_on_one_rank)


def evaluates_alone(world):
    model = Ours(Net())
    for _ in range(2):
        if world.rank == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randn(1, 6))
            model(torch.randn(1, 6))
            model.train()
        model(torch.randn(4, 6)).sum().backward()


def test_rank_0_may_evaluate_alone(pair):
    pair(evaluates_alone)


def without_buffers(world):
    with pytest.warns(FutureWarning, match="broadcast_buffers is deprecated"):
        model = Ours(Buffered(10.0 + world.rank), broadcast_buffers=False)
    assert model.module.b.tolist() == [10.0 + world.rank] * 2
    model().backward()
    assert model.module.b.tolist() == [11.0 + world.rank] * 2
    model = Ours(Buffered(10.0 + world.rank), forward_sync_buffers=False)
    assert model.module.b.tolist() == [10] * 2
    model.module.b += world.rank
    model().backward()
    assert model.module.b.tolist() == [11.0 + world.rank] * 2


def test_buffers_can_be_left_alone(pair):
    pair(without_buffers)


def buffers_by_hook(world, before):
    model = Ours(Buffered(0.0))
    model.module.b.fill_(world.rank)

    def add_up(state, buffers):
        assert list(buffers) == ["b"]
        futures = [dist.all_reduce(b, async_op=True).get_future() for b in buffers.values()]
        if before:  # forward reads them
            torch.futures.wait_all(futures)
        return None if before else futures

    location = _BufferCommHookLocation.PRE_FORWARD if before else None
    model._register_buffer_comm_hook(None, add_up, location)
    model().backward()
    n = world.world_size
    assert model.module.b.tolist() == [n * (n - 1) / 2 + (1 if before else n)] * 2


@pytest.mark.parametrize("before", [False, True], ids=["after forward", "before"])
def test_buffers_by_a_hook_of_ones_own(pair, before):
    pair(buffers_by_hook, before)
