"""Parameters that are transposed, or leave shared memory. More: tests/reducer/test_table.py."""

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from tests.support.on_ranks import on


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        *(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 5)),
    )


@pytest.mark.parametrize("views", [False, True])
@on("pair")
def test_one_rank_transposes_its_parameters(world, views):
    """Before the buckets are laid out anew: elements must not be summed with others' elements."""
    gradients = []
    for transposes in (False, True):
        model = conv_net()
        reducer = ddp.Reducer(model, gradient_as_bucket_view=views)
        if transposes and world.rank == 0:
            model.to(memory_format=torch.channels_last)
        for step in range(2):
            torch.manual_seed(10 * step + world.rank)
            model.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        reducer.remove()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


CHANGES = {
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "half and back": lambda model: model.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
@on("mpi-2")
def test_node_shared_parameters_that_moved_are_refused(world, change):
    model = conv_net()
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True, bucket_cap_mb=2**-10)
    optimizer = ddp.NodeSharedSGD(model.parameters(), lr=0.1, momentum=0.9, reducer=reducer)

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match="does not lie in shared memory any longer"):
        step()
