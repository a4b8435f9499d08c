"""What optimizers that divide their work among ranks refuse, and why."""

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from tests.support.on_ranks import on
from tests.support.terms import own

# A Reducer that was removed ---------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["world", "node"])
@on("gloo-2")
def test_an_optimizer_that_divides_its_step_needs_its_reducer(world, shard):
    model = nn.Linear(3, 3)
    ddp.broadcast_parameters(model)
    reducer = Reducer(model)
    optimizer = ddp.SGD(model.parameters(), 1.0, momentum=0.9, reducer=reducer, shard=shard)
    x = torch.full((2, 3), own(world))
    optimizer.backward_and_step(model(x).sum())
    reducer.remove()
    before = model.weight.detach().clone()
    model(x).sum().backward()
    text = "the Reducer was removed, so gradients are local"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    with pytest.raises(RuntimeError, match=text):
        optimizer.backward_and_step(model(x).sum())
    assert torch.equal(model.weight, before)
    state = optimizer.state_dict()
    # As the error says: a new Reducer and a new optimizer, with the state of the old one.
    other = ddp.SGD(model.parameters(), 1.0, momentum=0.9, reducer=Reducer(model), shard=shard)
    other.load_state_dict(state)
    other.zero_grad()
    model(x).sum().backward()
    other.step()
    assert not torch.equal(model.weight, before)
    ddp.check_sync(model)


@on("gloo-2")
def test_muon_needs_its_reducer(world):
    model = nn.Linear(3, 3, bias=False)
    reducer = Reducer(model)
    optimizer = ddp.Muon(model.parameters(), reducer=reducer)
    reducer.remove()
    model(torch.full((2, 3), own(world))).sum().backward()
    with pytest.raises(RuntimeError, match=r"Muon divides .*the Reducer was removed"):
        optimizer.step()


def test_one_rank_divides_nothing(alone):
    model = nn.Linear(3, 3, bias=False)
    for make in (
        lambda reducer: ddp.Muon(model.parameters(), reducer=reducer),
        lambda reducer: ddp.SGD(model.parameters(), 1.0, reducer=reducer, shard="world"),
    ):
        reducer = Reducer(model)
        optimizer = make(reducer)
        reducer.remove()
        model(torch.ones(2, 3)).sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model.weight, before)


# What shard cannot move -------------------------------------------------------------------------


@on("gloo-2")
def test_shard_says_why_it_cannot_move_a_parameter(world):
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"with strides \(6, 2\) instead of \(3, 1\): make it"):
        ddp.SGD(model.parameters(), 0.1, reducer=Reducer(model), shard="world")
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(4, 6))
    model.q = nn.Parameter(model.p.detach()[1:])
    with pytest.raises(ValueError, match=r"which shares memory with another one$"):
        ddp.SGD(model.parameters(), 0.1, reducer=Reducer(model), shard="world")
