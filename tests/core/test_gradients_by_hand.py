"""Gradients that a program puts into `.grad` itself, with memory that others have, too."""

import pytest
import torch
from torch import nn

from ddp_from_scratch import Reducer
from tests.support.on_ranks import on
from tests.support.terms import mean, own

OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 0},
    {"shared_memory": False},
]


class Two(nn.Module):
    """Two parameters of one shape, whose strides are not those of a contiguous tensor."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 4, dtype=dtype).t())
        self.b = nn.Parameter(torch.zeros(3, 4, dtype=dtype).t())

    def forward(self, x):
        return (self.a + self.b).sum() * x


def assert_averaged(model, *expected):
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.resolve_conj(), torch.full_like(parameter, value))
    parameters = list(model.parameters())
    memory = {parameter.grad.data_ptr() for parameter in parameters}
    assert len(memory | {parameter.data_ptr() for parameter in parameters}) == 4
    for parameter in parameters:
        assert parameter.grad.stride() == parameter.stride()
        parameter.grad.zero_()  # raises for an expanded tensor


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("pair")
def test_expanded_gradients_are_averaged(world, options):
    model = Two()
    reducer = Reducer(model, **options)
    parameters = list(model.parameters())
    for _ in range(3):
        gradients = torch.autograd.grad(model(own(world)), parameters)
        assert 0 in gradients[0].stride()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        reducer.average_gradients()
        assert_averaged(model, mean(world), mean(world))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("pair")
def test_a_gradient_that_only_one_rank_shares_is_averaged(world, options):
    model = Two()
    reducer = Reducer(model, **options)
    for _ in range(3):
        model.a.grad = torch.full_like(model.a, own(world))
        model.b.grad = model.a.grad if world.rank == 0 else torch.full_like(model.b, 9.0)
        reducer.average_gradients()
        of_b = (world.world_size + 9 * (world.world_size - 1)) / world.world_size
        assert_averaged(model, mean(world), of_b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("pair")
def test_a_gradient_in_the_memory_of_a_parameter_leaves_the_parameter_alone(world, options):
    model = Two()
    reducer = Reducer(model, check_first_average=False, **options)
    for _ in range(3):
        with torch.no_grad():
            model.a.fill_(own(world))
        model.a.grad, model.b.grad = model.a.detach(), model.a.detach().view_as(model.b)
        reducer.average_gradients()
        assert torch.equal(model.a, torch.full_like(model.a, own(world)))
        assert_averaged(model, mean(world), mean(world))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_overlapping_windows_of_a_gradient_are_averaged(world, options):
    model = Two()
    reducer = Reducer(model, **options)
    values = torch.arange(9.0) * own(world)
    model.a.grad = values.as_strided((4, 3), (2, 1))  # torch writes to it without an error
    model.b.grad = torch.full((4, 3), own(world))
    reducer.average_gradients()
    expected = torch.tensor([[0.0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]])
    assert torch.equal(model.a.grad, expected * mean(world))
    assert model.a.grad.stride() == model.a.stride()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_lazy_views_of_other_gradients_are_averaged(world, options):
    model = Two(torch.complex64)
    reducer = Reducer(model, **options)
    for _ in range(3):
        model.a.grad = torch.full((4, 3), complex(own(world), 1))
        model.b.grad = model.a.grad.conj()
        reducer.average_gradients()
        assert_averaged(model, complex(mean(world), 1), complex(mean(world), -1))
        pairs = torch.view_as_complex(torch.full((4, 3, 2), own(world)))
        model.a.grad = torch._neg_view(pairs)
        model.b.grad = pairs
        reducer.average_gradients()
        value = complex(mean(world), mean(world))
        assert_averaged(model, -value, value)


@on("gloo-2")
def test_gradients_in_one_flat_tensor_of_the_program_stay_there(world):
    model = Two()
    reducer = Reducer(model)
    flat = torch.full((24,), own(world))
    model.a.grad, model.b.grad = (part.view(3, 4).t() for part in flat.split(12))
    for _ in range(2):
        reducer.average_gradients()
        assert torch.equal(flat, torch.full((24,), mean(world)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on("gloo-2")
def test_a_hook_may_leave_an_expanded_gradient(world, options):
    model = Two()

    def flatten(parameter):
        parameter.grad = parameter.grad.mean().expand_as(parameter)

    model.b.register_post_accumulate_grad_hook(flatten)
    Reducer(model, **options)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert_averaged(model, mean(world), mean(world))
