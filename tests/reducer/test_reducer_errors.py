"""Errors of the Reducer where ranks would drift apart: each names the parameter and the rank."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from tests.support.terms import Terms, each_cap, each_overlap, each_view, mean, own


def missing(world, cap, overlap):
    model = Terms(1, 2, 3, 4)
    Reducer(model, bucket_cap_mb=cap, overlap=overlap)
    model(own(world)).backward()
    model(own(world), (0, 1, 3)).backward()
    named = rf"no gradient in the last backward pass on rank {world.rank} for: .*\bp2\b"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=named) as caught:
            model(own(world))
        assert cap != 0 or "p1" not in str(caught.value)


@each_cap
@each_overlap
def test_parameter_without_gradient_is_named_by_the_next_forward(pair, cap, overlap):
    pair(missing, cap, overlap)


def missing_on_one_rank(world):
    """Rank 0 waits for rank 1 in vain, so in a group with a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    model = Terms(1, 2)
    Reducer(model, group)
    if world.rank == 0:
        with pytest.raises(RuntimeError):
            model(own(world)).backward()
    else:
        model(own(world), (1,)).backward()
        with pytest.raises(RuntimeError, match="pass on rank 1 for: p0"):
            model(own(world))
    dist.barrier()
    dist.destroy_process_group(group)


def test_parameter_without_gradient_on_one_rank_is_named_there(ranks):
    ranks("gloo", 2)(missing_on_one_rank)


def missing_in_checkpoint(world, reentrant):
    model = Terms(1, 2)
    Reducer(model)
    x = torch.tensor(own(world), requires_grad=True)
    checkpoint(model, x, (0,), use_reentrant=reentrant).backward()
    with pytest.raises(RuntimeError, match=f"pass on rank {world.rank} for: p1"):
        checkpoint(model, x, (0,), use_reentrant=reentrant).backward()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_parameter_without_gradient_is_named_also_under_checkpointing(pair, reentrant):
    pair(missing_in_checkpoint, reentrant)


def missing_with_forward_in_no_sync(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    with reducer.no_sync():
        loss = model(own(world), (0,))
    loss.backward()
    named = pytest.raises(RuntimeError, match=f"pass on rank {world.rank} for: p1")
    with named, reducer.no_sync():
        model(own(world), (0,))


def test_parameter_without_gradient_is_named_also_when_only_forward_is_in_no_sync(pair):
    pair(missing_with_forward_in_no_sync)


def train_a_part_only(world):
    """Never through the module itself, so that no forward of its own can notice."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    Reducer(model, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    unrelated = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    before = model[0].weight.item()
    model[0](torch.full((1, 1), own(world))).sum().backward()
    unrelated.step()
    with pytest.raises(RuntimeError, match=rf"no gradient .* on rank {world.rank} for: 1\.weight"):
        optimizer.step()
    assert model[0].weight.item() == before


def test_an_optimizer_does_not_step_on_what_is_not_averaged(pair):
    pair(train_a_part_only)


def step_during_backward(world):
    model = Terms(1, 2)
    Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.p0.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss = model(own(world))
    with pytest.raises(RuntimeError, match=f"stepped during backward on rank {world.rank}"):
        loss.backward()


def test_an_optimizer_that_steps_during_backward_is_named(pair):
    pair(step_during_backward)


def change_requires_grad(world, before):
    model = Terms(1, 2)
    model.p1.requires_grad = before
    reducer = Reducer(model)
    model(own(world)).backward()
    model.p1.requires_grad = not before
    text = rf"parameter p1 became .* requires_grad={not before} on rank {world.rank}"
    with pytest.raises(RuntimeError, match=text):
        model(own(world))
    reducer.remove()
    Reducer(model)
    model.zero_grad()
    model(own(world)).backward()
    assert model.p0.grad.tolist() == [mean(world)]


@pytest.mark.parametrize("before", [True, False], ids=["freeze", "unfreeze"])
def test_change_of_requires_grad_is_named(pair, before):
    pair(change_requires_grad, before)


def change_dtype(world):
    """A float32 bucket would round float64 gradients without a word."""
    model = Terms(1, 2)
    Reducer(model)
    model.double()
    with pytest.raises(RuntimeError, match=r"parameter p0 became torch\.float64 on cpu"):
        model(own(world))


def test_change_of_dtype_is_named(pair):
    pair(change_dtype)


def add_parameter(world):
    model = Terms(1, 2)
    Reducer(model)
    model(own(world)).backward()
    model.p2 = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="p2"):
        model(own(world))


def test_parameter_added_after_construction_is_named(pair):
    pair(add_parameter)


def replace_parameter(world):
    model = Terms(1, 2)
    Reducer(model)
    model(own(world)).backward()
    model.p1 = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="p1"):
        model(own(world))


def test_parameter_replaced_after_construction_is_named(pair):
    pair(replace_parameter)


def remove_parameter(world):
    model = Terms(1, 2)
    Reducer(model)
    model(own(world)).backward()
    del model.p1
    with pytest.raises(RuntimeError, match=f"parameter p1 was removed on rank {world.rank}"):
        model(own(world))


def test_parameter_removed_after_construction_is_named(pair):
    pair(remove_parameter)


def second_gradient(world, cap, in_no_sync):
    model = Terms(1, 2, 3)
    reducer = Reducer(model, bucket_cap_mb=cap)
    one, two = model(own(world), (1, 2)), model(own(world), (2, 0))
    one.backward()
    context = reducer.no_sync() if in_no_sync else nullcontext()
    text = f"parameter p2 got a second gradient on rank {world.rank} "
    with pytest.raises(RuntimeError, match=text), context:
        two.backward()


@each_cap
def test_second_gradient_while_the_first_is_under_way_is_named(pair, cap):
    """It would be overwritten by the average of the first."""
    pair(second_gradient, cap, False)


def test_second_gradient_while_the_first_is_under_way_is_named_also_in_no_sync(pair):
    pair(second_gradient, 0, True)


def second_gradient_in_an_inner_pass(world, view):
    """On one rank: it raises when the other has what it waits for, and both train on."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=view)
    x = torch.full((2, 3), world.rank + 1.0)

    def loss(inner):
        h = model[0](x)
        if inner:  # the last layer's bucket is launched before this pass within the pass
            h = checkpoint(lambda h: model[2](model[1](h)), h, use_reentrant=True)
        else:
            h = model[1](h)
        return model[2](h).sum()

    for _ in range(2):
        loss(False).backward()
        model.zero_grad()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"parameter 2.* got a second gradient on rank 0"):
            loss(True).backward()
    else:
        loss(False).backward()
    model.zero_grad()
    loss(False).backward()
    assert model[2].bias.grad.tolist() == [2.0] * 3


@each_view
def test_second_gradient_in_a_pass_within_the_pass(pair, view):
    pair(second_gradient_in_an_inner_pass, view)


class Lookup(Terms):
    """p0 gets a sparse gradient, which no module has declared."""

    def forward(self, x):
        return nn.functional.embedding(torch.tensor([1, 3]), self.p0, sparse=True).sum()


def undeclared_sparse(world):
    model = Lookup()
    model.p0 = nn.Parameter(torch.zeros(5, 2))
    Reducer(model)
    message = f"gradient of parameter p0 is sparse on rank {world.rank}, but its module has not"
    with pytest.raises(RuntimeError, match=message):
        model(1.0).backward()


def test_undeclared_sparse_gradient_is_named(pair):
    pair(undeclared_sparse)
