"""Synchronised batch norm in models that train: branches, ranks without data, weights."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    broadcast_parameters,
    convert_sync_batchnorm,
    join,
)
from ddp_from_scratch.checks.module_snapshot import ModuleSnapshot
from tests.sync.test_sync_batch_norm import assert_one


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )


def training(world, own_group, how):
    """A CNN trained with the Reducer beside one process on the whole batch."""
    n = world.world_size
    torch.manual_seed(world.rank)
    ours = CNN().double()
    broadcast_parameters(ours)
    whole = copy.deepcopy(ours)
    group = dist.new_group(list(range(n))) if own_group else None
    convert_sync_batchnorm(ours, group)
    Reducer(ours, bucket_cap_mb=5e-4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (ours, whole)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        x = torch.randn(4 * n, 2, 9, 9, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (4 * n,), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = x.chunk(n)[world.rank]
        output = ours(mine) if how is None else checkpoint(ours, mine, use_reentrant=False)
        cross_entropy(output, y.chunk(n)[world.rank]).backward()
        cross_entropy(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-11, name
    if how is None:  # recomputing a forward counts its batch again, as in torch
        for (name, p), q in zip(ours.named_buffers(), whole.buffers(), strict=True):
            assert (p - q).abs().max() < 1e-11, name
    return [tensor.detach().numpy().tobytes() for tensor in ours.state_dict().values()]


@pytest.mark.parametrize("own_group", [False, True], ids=["one group", "a group of its own"])
def test_training_is_that_of_one_process(crew, own_group):
    assert_one(crew(training, own_group, None))


def converted_later(world):
    """The Reducer does not take a layer that was replaced for a changed model."""
    model = CNN()
    broadcast_parameters(model)
    Reducer(model)
    convert_sync_batchnorm(model)
    model(torch.randn(2, 2, 9, 9)).square().sum().backward()
    model(torch.randn(2, 2, 9, 9))


def test_what_is_there_for_one_call_is_no_new_layer():
    """Its number may be that of a parameter which replaces another later."""
    model = CNN()
    snapshot = ModuleSnapshot(model)
    seen, weight = snapshot.communicating, model[0].weight
    model[0]._parameters["weight"] = weight.detach() * 2  # as torch.func.functional_call does
    assert snapshot.difference(model) is None
    assert snapshot.communicating is seen
    model[0]._parameters["weight"] = weight
    convert_sync_batchnorm(model)
    assert snapshot.difference(model) is None
    assert [type(layer) for layer in snapshot.communicating] == [SyncBatchNorm, SyncBatchNorm]


def test_conversion_after_the_reducer_is_made(crew):
    crew(converted_later)


class Branching(nn.Module):
    """A batch norm, and a branch below it that only some ranks take.

    The branch is in the first bucket, as the last to be registered, but its gradient comes last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.branch = nn.Linear(4, 4, bias=False)

    def before(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return self.branch(x) if takes else x

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return self.head(self.norm(self.before(x, takes)))


def branching(world, own_group, options):
    n = world.world_size
    torch.manual_seed(0)
    ours = Branching().double()
    whole = copy.deepcopy(ours)
    convert_sync_batchnorm(ours, dist.new_group(list(range(n))) if own_group else None)
    reducer = Reducer(ours, bucket_cap_mb=0, **options)
    for step in range(4):
        x = torch.randn(n, 3, 4, dtype=torch.float64)
        static = "static_graph" in options
        takes = [(rank + (0 if static else step)) % 2 == 0 for rank in range(n)]
        ours.zero_grad()
        whole.zero_grad()
        ours(x[world.rank], takes[world.rank]).square().mean().backward()
        both = torch.cat([whole.before(part, take) for part, take in zip(x, takes, strict=True)])
        whole.head(whole.norm(both)).square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() < 1e-12, (step, name)
    reducer.remove()


@pytest.mark.parametrize("options", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("own_group", [False, True], ids=["one group", "a group of its own"])
def test_a_branch_that_only_some_ranks_take(crew, own_group, options):
    crew(branching, own_group, {options: True})


def below_one_rank_alone(world):
    """Layers learn below the norm on rank 0 alone; on the others nothing learns at all."""
    n = world.world_size
    torch.manual_seed(0)
    branch = nn.Linear(4, 4, bias=False).double()
    plain, norm = copy.deepcopy(branch), nn.BatchNorm1d(4, affine=False).double()
    model = nn.Sequential(branch, convert_sync_batchnorm(copy.deepcopy(norm)))
    reducer = Reducer(model, find_unused_parameters=True)
    for _ in range(3):
        x, weights = torch.randn(2, n, 3, 4, dtype=torch.float64)
        model.zero_grad()
        plain.zero_grad()
        # Through forward, for the Reducer to see the graph: the branch is skipped by a flag.
        model[0].forward = partial(_apply_if, branch, world.rank == 0)
        (model(x[world.rank]) * weights[world.rank]).sum().backward()
        both = torch.cat([plain(x[0]), *x[1:]])
        (norm(both) * weights.flatten(0, 1)).sum().backward()
        assert (branch.weight.grad - plain.weight.grad / n).abs().max() < 1e-12
    reducer.remove()


def _apply_if(layer, applies, x):
    return nn.functional.linear(x, layer.weight) if applies else x


def test_layers_that_learn_on_one_rank_alone(crew):
    crew(below_one_rank_alone)


def unequal_weights(world):
    """Refused on every rank, and right with weighted losses; equal weights are right."""
    n = world.world_size
    sizes = range(2, 2 + n)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    broadcast_parameters(model)
    whole = copy.deepcopy(model)
    reducer = Reducer(convert_sync_batchnorm(model))
    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0)).double()
    mine = x.split(list(sizes))[world.rank]
    with pytest.raises(RuntimeError, match="weights of ranks differ"):
        reducer.weight(len(mine))
    for equal in (5, 0.1):
        reducer.weight(equal)
    total = torch.tensor(float(len(mine)))
    dist.all_reduce(total)
    loss = model(mine).square().mean() * len(mine) * n / total
    loss.backward()
    whole(x).square().mean().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-12
    model.eval()
    reducer.weight(len(mine))  # moments are not taken over ranks
    reducer.remove()


def test_unequal_weights_are_refused(crew):
    crew(unequal_weights)


def out_of_data(world, wrapped, accumulates):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    convert_sync_batchnorm(model)
    called = DistributedDataParallel(model) if wrapped else model
    reducer = called.reducer if wrapped else Reducer(model)
    context = called.join() if wrapped else join(reducer)

    def train() -> None:
        with context:
            for _ in range(2 + world.rank):
                with reducer.no_sync() if accumulates else nullcontext():
                    called(torch.randn(2, 3)).sum().backward()

    with pytest.raises(RuntimeError, match="a rank has run out of data"):
        train()
    reducer.remove()


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_runs_out_of_data_is_told(crew, wrapped, accumulates):
    crew(out_of_data, wrapped, accumulates)


def test_training_with_activation_checkpointing(crew):
    assert_one(crew(training, False, "checkpoint"))
