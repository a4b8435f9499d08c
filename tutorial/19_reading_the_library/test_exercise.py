from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ddp_from_scratch as ddp


def gradients(model, call):
    call(
        torch.randn(6, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    ).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))


def run(exercise, name, library):
    """Returns the hook's averages, the expected ones, the dtypes that were sent, and the state."""
    model = make_model()
    expected = gradients(model, model)
    dist.all_reduce(expected)
    expected /= dist.get_world_size()

    model = call = make_model()
    state, hook, sent = {"bytes": 0}, getattr(exercise, name), []
    if library == "Reducer":
        ddp.Reducer(model).register_comm_hook(state, hook)
    else:
        call = torch.nn.parallel.DistributedDataParallel(model)
        call.register_comm_hook(state, hook)
    all_reduce = dist.all_reduce

    def noted(tensor, *arguments, **options):
        sent.append(tensor.dtype)
        return all_reduce(tensor, *arguments, **options)

    with patch.object(dist, "all_reduce", noted):
        averages = gradients(model, call)
    return averages, expected, sent, state


in_both = pytest.mark.parametrize("library", ["Reducer", "DistributedDataParallel"])


@in_both
def test_average(on_ranks, library):
    for averages, expected, _, _ in on_ranks(3, run, "average", library):
        assert torch.allclose(averages, expected), "not the mean of all ranks' gradients"


@in_both
def test_half(on_ranks, library):
    for averages, expected, sent, _ in on_ranks(2, run, "half", library):
        assert set(sent) == {torch.float16}, "types of the tensors that were sent"
        assert averages.dtype == torch.float32
        assert torch.allclose(averages, expected, atol=0.01), "not the mean, up to 16 bits"


@in_both
def test_counted(on_ranks, library):
    for averages, expected, _, state in on_ranks(2, run, "counted", library):
        assert torch.allclose(averages, expected), "not the mean of all ranks' gradients"
        assert state["bytes"] == expected.nbytes
