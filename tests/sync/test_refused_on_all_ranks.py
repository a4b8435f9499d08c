"""What one rank alone cannot do is refused on all of them, before anything is sent."""

import pytest
import torch
from torch import nn

from ddp_from_scratch import (
    SGD,
    Adam,
    AdamW,
    NodeSharedAdam,
    Reducer,
    broadcast_buffers,
    broadcast_parameters,
)
from ddp_from_scratch.torch_ddp.distributed_data_parallel import DistributedDataParallel


class Expanded(nn.Module):
    """Its parameter, or its buffer, has five elements in the memory of one."""

    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))
        tensor = torch.zeros(1).expand(5)
        if kind == "parameter":
            self.wide = nn.Parameter(tensor)
        else:
            self.register_buffer("wide", tensor)

    def forward(self):
        return (self.weight + self.wide).sum()


def refused(world, kind, call):
    with pytest.raises(ValueError, match=f"{kind} wide is expanded: .*: clone") as error:
        call(Expanded(kind))
    return str(error.value)


def with_buffers(model):
    Reducer(model, broadcast_buffers=True)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("parameter", broadcast_parameters),
        ("buffer", broadcast_parameters),
        ("buffer", broadcast_buffers),
        ("buffer", with_buffers),
        ("parameter", DistributedDataParallel),
    ],
)
def test_several_elements_in_one_place(ranks, kind, call):
    told = ranks("gloo", 2)(refused, kind, call)
    assert told[0] == told[1]


def on_one_rank(world):
    kind = "buffer" if world.rank else "parameter"
    with pytest.raises(RuntimeError, match="the models differ: rank 0 has "):
        broadcast_parameters(Expanded(kind))


def test_several_elements_in_one_place_on_one_rank(ranks):
    ranks("gloo", 2)(on_one_rank)


def expanded_and_not_sent(world):
    """Neither read nor written by the others."""
    Reducer(Expanded("buffer")).remove()
    broadcast_parameters(Expanded("buffer"), ignore=["wide"])


def test_what_is_not_sent_may_be_expanded(ranks):
    ranks("gloo", 2)(expanded_and_not_sent)


def weighed(world, amount):
    """Rank 1 has a wrong weight: all raise, or the others would wait for it."""
    model = nn.Linear(2, 2)
    reducer = Reducer(model)
    loss = model(torch.ones(1, 2)).sum()
    if world.rank == 1:
        with pytest.raises(ValueError, match="a weight must be 0 or more, and finite, got"):
            reducer.weight(amount)
    else:
        reducer.weight(1)
        with pytest.raises(ValueError, match="another rank's weight is"):
            loss.backward()
    reducer.remove()


@pytest.mark.parametrize("amount", [1e200, 10**400, "many", None, [1.0]], ids=repr)
def test_a_weight_whose_sum_cannot_be_computed(ranks, amount):
    ranks("gloo", 2)(weighed, amount)


def with_adam(world, kind):
    model = nn.Linear(2, 2, dtype=torch.complex64)
    reducer = Reducer(model)
    with pytest.raises(ValueError, match=r"Adam\w* takes no complex parameters, got one of "):
        kind(model.parameters(), reducer=reducer)
    reducer.remove()


@pytest.mark.parametrize("kind", [Adam, AdamW, NodeSharedAdam])
def test_adam_on_complex_parameters(ranks, kind):
    ranks("gloo", 1)(with_adam, kind)


def later(world):
    model, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    reducer = Reducer(model)
    optimizer = Adam(model.parameters(), reducer=reducer)
    with pytest.raises(ValueError, match="Adam takes no complex parameters"):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1
    SGD(model.parameters(), reducer=reducer).add_param_group({"params": [other]})
    reducer.remove()


def test_adam_on_complex_parameters_that_come_later(ranks):
    ranks("gloo", 1)(later)
