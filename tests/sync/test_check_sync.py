"""Checksums; ranks that hold the same bits, and ranks that do not."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer, check_sync
from ddp_from_scratch.sync.check_sync import checksums
from tests.support.refusal import text_of
from tests.support.terms import recorded
from tests.support.tiers import slow

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn),
]


def test_checksums_of_every_dtype_and_shape():
    assert checksums([]) == []
    for dtype in DTYPES:
        ones = [torch.ones(shape).to(dtype) for shape in ((), (0,), (3,), (2, 5), (70_000,))]
        found = checksums(ones)
        assert found == checksums([tensor.clone() for tensor in ones])
        zeros = checksums([torch.zeros_like(tensor) for tensor in ones])
        assert [a == b for a, b in zip(found, zeros, strict=True)] == [t.numel() == 0 for t in ones]
    # The order counts, and strides do not.
    values = torch.randn(2, 3, 4, 5)
    transposed = values.transpose(0, 1).contiguous().transpose(0, 1)
    laid_out = values.to(memory_format=torch.channels_last)
    first, *others, other = checksums([values, laid_out, transposed, values.flip(0)])
    assert others == [first, first]
    assert other != first


def test_one_bit_anywhere_changes_the_checksum():
    """Also between pieces of 65,536 elements that only changed places."""
    values = torch.zeros(3 * 2**16, dtype=torch.int32)
    found = {checksums([values])[0]}
    for index in (0, 1, 2**16 - 1, 2**16, 2**17, 3 * 2**16 - 1):
        for bit in (1, 2**15, -(2**31)):
            changed = values.clone()
            changed[index] = bit
            found.add(checksums([changed])[0])
    assert len(found) == 1 + 6 * 3


def model(fill=0.5):
    layers = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(1, 2, 2), nn.Linear(2, 2).bfloat16())
    for parameter in layers.parameters():
        nn.init.constant_(parameter, fill)
    # A NaN is unequal to itself, and has equal bits.
    for name, value in {"empty": torch.zeros(0, 2), "nan": torch.tensor(math.nan)}.items():
        layers.register_parameter(name, nn.Parameter(value))
    layers.register_parameter("zero", nn.Parameter(torch.tensor(0.0)))
    return layers


def one_ulp(name):
    def change(here):
        last = here.layers.get_parameter(name).view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.full_like(last, math.inf)))

    return change


def extra(here):
    here.layers.register_parameter("extra", nn.Parameter(torch.tensor(1.0)))


def step_and_parameter(here):
    here.bias["step"].add_(3)
    here.layers[2].bias.fill_(7)


OF = " in the state of the optimizer for parameter"
SHARD = "shard in the state of optimizer 2 for parameter 0.bias"
ONE, TWO = ("[1] differ from rank 0 by up to ", "[2] differ from rank 0 by up to ")
ALONE = "[1] differ from rank 0: missing there, "
# The rank that differs, in what, how the error names it, and who differs from whom by how much.
DIFFERENCES = [
    (0, one_ulp("0.bias"), "parameter 0.bias", "[1, 2] differ from rank 0 by up to 5.96e-08"),
    (2, one_ulp("0.weight"), "parameter 0.weight", TWO + "5.96e-08"),
    (2, one_ulp("2.weight"), "parameter 2.weight", TWO + "0.00391"),
    # Equal, but what is computed from it differs.
    (1, lambda here: here.layers.zero.neg_(), "parameter zero", ONE + "0"),
    (1, extra, "parameter extra", ALONE + "torch.float32 () on rank 1"),
    (1, lambda here: here.bias["moment"][1:].add_(0.25), f"moment{OF} 1.bias", ONE + "0.25"),
    (2, step_and_parameter, "parameter 2.bias", TWO + "6.5"),
    (1, lambda here: here.weight["deep"].update(n=4), f"deep.n{OF} 0.weight", ONE + "3"),
    (1, lambda here: here.weight["list"][0].imag.add_(2), f"list.0{OF} 0.weight", ONE + "2"),
    (2, lambda here: here.shard["shard"].zero_(), SHARD, "[2] differ from rank 1 by up to 1"),
]


def differing(world, odd, change, label):
    """Two optimizers have states of every kind; of the second one's, sharded, rank 0 has none."""
    layers = model()
    first, second = (torch.optim.SGD(layers.parameters(), 1.0) for _ in "12")
    weight = first.state[layers[0].weight] = {
        "list": [torch.ones(3, dtype=torch.complex64), None],
        "text": object(),
        "deep": {"n": 1, "yes": True},
        "sparse": torch.full((2,), float(world.rank)).to_sparse(),
    }
    bias = first.state[layers[1].bias] = {"moment": torch.ones(2), "step": torch.tensor(3.0)}
    shard = {"shard": torch.ones(2)}
    if world.rank > 0:
        second.state[layers[0].bias] = shard
    held = check_sync(layers)
    assert held == check_sync(layers, optimizers=[first, second])
    if world.rank == odd:
        with torch.no_grad():
            change(SimpleNamespace(layers=layers, weight=weight, bias=bias, shard=shard))
    told = text_of(RuntimeError, check_sync, layers, optimizers=[first, second])
    ignored = [label.split()[-1], "1.bias"]
    check_sync(layers, optimizers=[first, second], ignore=ignored)
    if "state" in label:
        assert check_sync(layers) == held
    return told


def all_differing(world):
    one, other = check_sync(model()), check_sync(model(0.25))
    assert one != other
    assert len(one) == len(other) == 16
    return [differing(world, *case[:3]) for case in DIFFERENCES]


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_one_text_on_every_rank_names_the_first_difference(ranks, backend):
    for found in ranks(backend, 3)(all_differing):
        assert found == [f"{on} is not the same on all ranks: {by}" for *_, on, by in DIFFERENCES]


def training(every, kind=torch.optim.SGD, **options):
    ours = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for p in ours.parameters():
        nn.init.constant_(p, 0.5)
    reducer = Reducer(ours, check_every=every, gradient_as_bucket_view=kind is ddp.SGD)
    if kind is ddp.SGD:
        options["reducer"] = reducer
    optimizer = kind(ours.parameters(), lr=0.125, **options)

    def step():
        optimizer.zero_grad()
        ours(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    return ours, reducer, optimizer, step


def of_a_parameter(world):
    ours, _, _, step = training(2)
    for gathers in (2, 1, 0, 1, 0):  # the first average compares the start
        with recorded("all_gather") as called:
            step()
        assert len(called) == gathers
    if world.rank == 1:
        with torch.no_grad():
            ours[1].weight[0, 2] += 2
    text = r"^average 6: parameter 1.weight is not .*: \[1\] differ from rank 0 by up to 2$"
    with pytest.raises(RuntimeError, match=text):
        step()
    step()


def of_a_state(world):
    text = rf"average 6: momentum_buffer{OF} 0.bias is not .*\[2\] differ from rank 0 by up to 1"
    for kind in (torch.optim.SGD, ddp.SGD):
        ours, _, optimizer, step = training(3, kind, momentum=0.5)
        for _ in range(5):
            step()
        if world.rank == 2:
            optimizer.state[ours[0].bias]["momentum_buffer"][1] -= 1
        with pytest.raises(RuntimeError, match=text):
            step()


def not_by_ranks_without_data(world):
    """They hold parameters of earlier steps until the end."""
    ours, reducer, _, step = training(2)
    with ddp.join(reducer):
        for _ in range(3 + 2 * world.rank):
            step()
    assert reducer.iteration == 7
    check_sync(ours)


@pytest.mark.parametrize(
    ("backend", "drift"),
    [
        *(("gloo", of_a_parameter), ("gloo", of_a_state), slow("mpi", of_a_state)),
        ("gloo", not_by_ranks_without_data),
    ],
)
def test_a_reducer_finds_drift(ranks, backend, drift):
    ranks(backend, 3)(drift)
