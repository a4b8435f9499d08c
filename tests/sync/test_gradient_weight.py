"""Ranks that count by their number of samples: exactly the gradient of the whole batch."""

import copy
import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy

from ddp_from_scratch import Reducer
from ddp_from_scratch.group import gloo_beside, takes_cpu_tensors
from ddp_from_scratch.sync.gradient_weight import GradientWeight
from tests.support.terms import BYTES, Terms


def weighted(world, view):
    """Rank r has r samples with gradient r + 1 each."""
    n = world.world_size
    model = Terms(1, 2, 3)
    reducer = Reducer(model, bucket_cap_mb=8 * BYTES, gradient_as_bucket_view=view)
    amounts = range(n)
    expected = sum(r * (r + 1.0) for r in amounts) / sum(amounts)
    for _ in range(3):
        model.zero_grad()
        reducer.weight(world.rank)
        model(world.rank + 1.0).backward()
        for k, p in enumerate(model.parameters()):
            assert p.grad.tolist() == pytest.approx([(k + 1) * expected] * (k + 1), rel=1e-6)
        model.zero_grad()
        model(n * (world.rank + 1.0)).backward()  # once only
        assert model.p0.grad.tolist() == [n * (n + 1) / 2]


@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
def test_average_is_weighted_once(crew, view):
    crew(weighted, view)


def beside_one_process(world, name, hook):
    """Batches of 5, 2 and 0 samples, of which the last has a loss that is not a number."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    whole = copy.deepcopy(ours)
    sizes = [5, 2, 0][: world.world_size]
    reducer = Reducer(ours, bucket_cap_mb=1e-3, **name)
    if hook:
        reducer.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(4):
        x, y = torch.randn(sum(sizes), 6).double(), torch.randint(4, (sum(sizes),))
        mine = x.split(sizes)[world.rank], y.split(sizes)[world.rank]
        for model in (ours, whole):
            model.zero_grad()
        reducer.weight(sizes[world.rank])
        cross_entropy(ours(mine[0]), mine[1]).backward()
        cross_entropy(whole(x), y).backward()
        for p, q in zip(ours.parameters(), whole.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() < 1e-15


@pytest.mark.parametrize("name", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_unequal_batches_give_the_gradient_of_the_whole_batch(crew, name):
    crew(beside_one_process, name, False)


def test_weights_hold_for_any_comm_hook(crew):
    crew(beside_one_process, {}, True)


def refused(world):
    model = Terms(1)
    reducer = Reducer(model)
    for amount in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"0 or more, and finite, got {amount}"):
            reducer.weight(amount)
    reducer.weight(0)
    loss = model(1.0)
    with pytest.raises(ValueError, match="all ranks are 0"):
        loss.backward()


def test_what_is_no_weight_is_refused(ranks):
    ranks("gloo", 2)(refused)


class OnGpus(dist.ProcessGroup):
    """A group that takes no tensors on a CPU, as nccl's."""

    options = SimpleNamespace(_timeout=timedelta(seconds=20))

    @property
    def _device_types(self):
        return [torch.device("cuda")]

    def _get_backend(self, device):
        return self


def agreed_beside_gpus(world):
    """On the host, which need not wait for the GPU, over a group of gloo."""
    assert takes_cpu_tensors(None)
    on_gpus = OnGpus(world.rank, world.world_size)
    # On mpi torch's own store may be a placeholder.
    store = dist.distributed_c10d._get_process_group_store(dist.new_group(backend="gloo"))
    with (
        patch.object(dist.distributed_c10d, "_get_process_group_store", lambda group: store),
        patch.object(dist, "get_rank", lambda group: world.rank),
    ):
        assert not takes_cpu_tensors(on_gpus)
        beside = gloo_beside(on_gpus)
        assert gloo_beside(on_gpus) is beside
    assert beside.name() == "gloo"
    shares = [GradientWeight(world.rank + 1.0, beside), GradientWeight(0.1, beside)]
    total = world.world_size * (world.world_size + 1) / 2
    assert [share.total() for share in shares] == [total, pytest.approx(0.1 * world.world_size)]
    assert [share.all_equal() for share in shares] == [False, True]
    assert shares[0].value() == (world.rank + 1) * world.world_size / total


def test_weights_are_agreed_on_beside_the_gpu(crew):
    crew(agreed_beside_gpus)


def beside_some(world):
    """torch names the groups that come later by a count that all ranks must agree on."""
    some = dist.new_group([0, 1])
    if world.rank < 2:
        beside = gloo_beside(some)
        assert GradientWeight(world.rank + 1.0, beside).total() == 3.0
        gone = weakref.ref(beside)
        dist.destroy_process_group(some)
        del some, beside
        gc.collect()
        assert gone() is None
    every = dist.new_group(list(range(world.world_size)))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=every)
    return tensor.item()


def test_a_gloo_group_beside_some_ranks_disturbs_no_later_group(ranks):
    assert ranks("gloo", 3)(beside_some) == [3.0] * 3


def wrong_on_one_rank(world):
    """All raise: the others would wait for gradients that do not come."""
    model = nn.Linear(2, 2)
    reducer = Reducer(model)
    loss = model(torch.ones(1, 2)).sum()
    if world.rank == 1:
        with pytest.raises(ValueError, match="must be 0 or more, and finite, got nan"):
            reducer.weight(float("nan"))
    else:
        reducer.weight(1)
        with pytest.raises(ValueError, match="another rank's weight is negative or not finite"):
            loss.backward()
    reducer.remove()


def test_a_wrong_weight_is_every_ranks_error(crew):
    crew(wrong_on_one_rank)
