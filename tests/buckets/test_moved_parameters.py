"""Gradients and parameters that a program moves between steps: `module.to(...)` and its like.

Those put new memory under the same tensor objects. The averages must be those of a Reducer that
keeps no views.
"""

import numpy as np
import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp

CHANGES = {
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "half and back": lambda model: model.half().float(),
    "double and back": lambda model: model.double().float(),
    "grad.data": lambda model: [_set_data(p) for p in model.parameters()],
    "grad detached": lambda model: [_detach(p) for p in model.parameters()],
}


def _set_data(parameter):
    if parameter.grad is not None:
        parameter.grad.data = parameter.grad.data.clone()


def _detach(parameter):
    if parameter.grad is not None:
        parameter.grad = parameter.grad.detach()


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        *(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 5)),
    )


def train(world, change, optimizer, set_to_none, views, moved_on, accumulate=False):
    """The parameters after five steps, with the change before the fourth."""
    model = conv_net()
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=views, bucket_cap_mb=2**-10)
    if optimizer == "torch":
        stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        stepper = getattr(ddp, optimizer)(model.parameters(), lr=0.1, momentum=0.9, reducer=reducer)
    for step in range(5):
        torch.manual_seed(10 * step + world.rank)
        if step == 3 and not accumulate and world.rank in moved_on:
            CHANGES[change](model)
        stepper.zero_grad(set_to_none)
        if accumulate:
            with reducer.no_sync():
                model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        if step == 3 and accumulate and world.rank in moved_on:
            CHANGES[change](model)
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        stepper.step()
    ddp.check_sync(model)
    reducer.remove()
    return [p.detach().clone().numpy() for p in model.parameters()]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize(
    ("backend", "optimizer"), [("gloo", "torch"), ("gloo", "SGD"), ("mpi", "SGD")]
)
@pytest.mark.parametrize("change", CHANGES)
def test_averages_as_without_views(ranks, backend, change, optimizer, set_to_none, accumulate):
    crew = ranks(backend, 2)
    ours = crew(train, change, optimizer, set_to_none, True, (0, 1), accumulate)
    plain = crew(train, change, "torch", set_to_none, False, (0, 1), accumulate)
    for mine, theirs in zip(ours[0], plain[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_one_rank_transposes_its_parameters(ranks, backend, views):
    """Before the buckets are laid out anew: elements must not be summed with others' elements."""
    crew = ranks(backend, 2)
    ours = crew(transposed_on_rank_0, views, True)
    plain = crew(transposed_on_rank_0, views, False)
    for mine, theirs in zip(ours[0], plain[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def transposed_on_rank_0(world, views, transposes):
    model = conv_net()
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, gradient_as_bucket_view=views)
    if transposes and world.rank == 0:
        model.to(memory_format=torch.channels_last)
    for step in range(2):
        torch.manual_seed(10 * step + world.rank)
        model.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    reducer.remove()
    return [p.grad.clone().numpy() for p in model.parameters()]


@pytest.mark.parametrize("change", ["channels_last", "half and back"])
def test_node_shared_parameters_that_moved_are_refused(ranks, change):
    messages = ranks("mpi", 2)(moved_out_of_shared_memory, change)
    assert all("does not lie in shared memory any longer" in message for message in messages)


def moved_out_of_shared_memory(world, change):
    with pytest.raises(RuntimeError) as error:
        train(world, change, "NodeSharedSGD", True, True, (0, 1))
    return str(error.value)
