"""What one rank alone cannot do is refused on all of them, before anything is sent."""

import pytest
import torch
from torch import nn

from ddp_from_scratch import (
    SGD,
    Adam,
    AdamW,
    DistributedDataParallel,
    NodeSharedAdam,
    Reducer,
    broadcast_buffers,
    broadcast_parameters,
)
from tests.support.on_ranks import on


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


def with_buffers(model):
    Reducer(model, broadcast_buffers=True)


EXPANDED = [
    ("parameter", broadcast_parameters),
    ("buffer", broadcast_parameters),
    ("buffer", broadcast_buffers),
    ("buffer", with_buffers),
    ("parameter", DistributedDataParallel),
]


@on("gloo-2")
def test_several_elements_in_one_place(world):
    """On all ranks, or on one alone; what is not sent may be expanded."""
    for kind, call in EXPANDED:
        with pytest.raises(ValueError, match=f"{kind} wide is expanded: .*: clone"):
            call(Expanded(kind))
    with pytest.raises(RuntimeError, match="the models differ: rank 0 has "):
        broadcast_parameters(Expanded("buffer" if world.rank else "parameter"))
    Reducer(Expanded("buffer")).remove()
    broadcast_parameters(Expanded("buffer"), ignore=["wide"])


@on("gloo-1")
def test_adam_on_complex_parameters(world):
    """At once or later, which adds no group."""
    real, complex_ = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)
    for kind in (Adam, AdamW, NodeSharedAdam):
        with pytest.raises(ValueError, match=r"Adam\w* takes no complex parameters, got one of "):
            kind(complex_.parameters(), reducer=Reducer(complex_))
    reducer = Reducer(real)
    optimizer = Adam(real.parameters(), reducer=reducer)
    with pytest.raises(ValueError, match="Adam takes no complex parameters"):
        optimizer.add_param_group({"params": complex_.parameters()})
    assert len(optimizer.param_groups) == 1
    SGD(real.parameters(), reducer=reducer).add_param_group({"params": complex_.parameters()})
