"""Ranks that hold the same bits, and ranks that do not."""

import math

import pytest
import torch
from torch import nn

from ddp_from_scratch import check_sync


@pytest.fixture(params=["gloo-3", "mpi-3"])
def trio(ranks, request):
    return ranks(request.param.split("-")[0], 3)


def model(fill: float = 0.5) -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(1, 2, 2), nn.Linear(2, 2).bfloat16())
    layers.register_parameter("empty", nn.Parameter(torch.zeros(0, 2)))
    layers.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, fill)
    return layers


def one_model(world):
    return check_sync(model())


def test_equal_parameters_give_one_checksum(trio):
    checksums = set(trio(one_model))
    assert len(checksums) == 1
    assert len(checksums.pop()) == 16


def two_models(world):
    return check_sync(model(0.5)), check_sync(model(0.25))


def test_checksum_depends_on_the_values(trio):
    for one, other in trio(two_models):
        assert one != other


def one_bit_off(world, name, odd):
    ours = model()
    if world.rank in odd:
        with torch.no_grad():
            last = ours.get_parameter(name).view(-1)[-1:]
            last.copy_(torch.nextafter(last, torch.full_like(last, math.inf)))
    with pytest.raises(RuntimeError) as caught:
        check_sync(ours)
    return str(caught.value)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "2.weight", "scalar"])
def test_one_ulp_in_one_parameter_is_named_on_every_rank(trio, name):
    text = f"parameter {name} is not the same on all ranks: [2] differ from rank 0"
    assert trio(one_bit_off, name, [2]) == [text] * 3


def test_ranks_are_compared_with_rank_0(trio):
    text = "parameter 0.bias is not the same on all ranks: [1, 2] differ from rank 0"
    assert trio(one_bit_off, "0.bias", [0]) == [text] * 3


def signed_zero_and_nan(world):
    with pytest.raises(RuntimeError, match="parameter scalar is not the same"):
        check_sync(model(-0.0 if world.rank == 1 else 0.0))
    check_sync(model(math.nan))


def test_bits_are_compared_and_not_values(trio):
    """-0.0 == 0.0, but what is computed from them differs; a NaN is unequal to itself."""
    trio(signed_zero_and_nan)


def extra_parameter(world, odd):
    ours = model()
    if world.rank == odd:
        ours.register_parameter("extra", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(RuntimeError, match="parameter extra is not the same on all ranks"):
        check_sync(ours)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_parameter_that_one_rank_lacks_is_named_on_every_rank(trio, odd):
    trio(extra_parameter, odd)
