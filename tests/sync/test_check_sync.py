"""Checksums; ranks that hold the same bits, and ranks that do not."""

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer, check_sync
from ddp_from_scratch.sync.checksum import checksums
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


def test_a_checksum_depends_on_the_order_and_not_on_strides():
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


# check_sync -------------------------------------------------------------------------------------


def model(fill=0.5):
    layers = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(1, 2, 2), nn.Linear(2, 2).bfloat16())
    for name, value in {"empty": torch.zeros(0, 2), "nan": torch.tensor(math.nan)}.items():
        layers.register_parameter(name, nn.Parameter(value))
    for parameter in layers.parameters():
        if not parameter.isnan().any():  # a NaN is unequal to itself, and has equal bits
            nn.init.constant_(parameter, fill)
    layers.register_parameter("zero", nn.Parameter(torch.tensor(0.0)))
    return layers


def optimizers_of(world, layers):
    """Two, with states of every kind; the second one's is sharded, and rank 0 has none of it."""
    first, second = (torch.optim.SGD(layers.parameters(), 1.0) for _ in "12")
    first.state[layers[0].weight] = {
        "list": [torch.ones(3, dtype=torch.complex64), None],
        "text": object(),
        "deep": {"n": 1, "yes": True},
        "sparse": torch.full((2,), float(world.rank)).to_sparse(),
    }
    first.state[layers[1].bias] = {"moment": torch.ones(2), "step": torch.tensor(3.0)}
    if world.rank > 0:
        second.state[layers[0].bias] = {"shard": torch.ones(2)}
    return first, second


def one_ulp(name):
    def change(layers, first, second):
        last = layers.get_parameter(name).view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.full_like(last, math.inf)))

    return change


def extra(layers, first, second):
    layers.register_parameter("extra", nn.Parameter(torch.tensor(1.0)))


OF = " in the state of the optimizer for parameter"
# The rank that differs, in what, how the error names it, and who differs from whom by how much.
DIFFERENCES = [
    (2, one_ulp("0.weight"), "parameter 0.weight", "[2] differ from rank 0 by up to 5.96e-08"),
    (2, one_ulp("2.weight"), "parameter 2.weight", "[2] differ from rank 0 by up to 0.00391"),
    (0, one_ulp("0.bias"), "parameter 0.bias", "[1, 2] differ from rank 0 by up to 5.96e-08"),
    # Equal, but what is computed from it differs.
    (1, lambda m, *_: m.zero.neg_(), "parameter zero", "[1] differ from rank 0 by up to 0"),
    (0, extra, "parameter extra", "[1, 2] differ from rank 0: {} there, missing on rank 1"),
    (1, extra, "parameter extra", "[1] differ from rank 0: missing there, {} on rank 1"),
    (
        *(1, lambda m, a, _: a.state[m[1].bias]["moment"][1:].add_(0.25)),
        *(f"moment{OF} 1.bias", "[1] differ from rank 0 by up to 0.25"),
    ),
    (
        *(2, lambda m, a, _: a.state[m[1].bias]["step"].add_(3)),
        *(f"step{OF} 1.bias", "[2] differ from rank 0 by up to 3"),
    ),
    (  # parameters come first
        *(2, lambda m, a, _: (a.state[m[1].bias]["step"].add_(3), m[2].bias.fill_(7))),
        *("parameter 2.bias", "[2] differ from rank 0 by up to 6.5"),
    ),
    (
        *(1, lambda m, a, _: a.state[m[0].weight]["deep"].update(n=4)),
        *(f"deep.n{OF} 0.weight", "[1] differ from rank 0 by up to 3"),
    ),
    (
        *(1, lambda m, a, _: a.state[m[0].weight]["list"][0].imag.add_(2)),
        *(f"list.0{OF} 0.weight", "[1] differ from rank 0 by up to 2"),
    ),
    (
        *(2, lambda m, _, b: b.state[m[0].bias]["shard"].zero_()),
        *(
            "shard in the state of optimizer 2 for parameter 0.bias",
            "[2] differ from rank 1 by up to 1",
        ),
    ),
]


def differing(world, case):
    odd, change, label, _ = DIFFERENCES[case]
    layers = model()
    first, second = optimizers_of(world, layers)
    held = check_sync(layers)
    assert held == check_sync(layers, optimizers=[first, second])
    if world.rank == odd:
        with torch.no_grad():
            change(layers, first, second)
    with pytest.raises(RuntimeError) as caught:
        check_sync(layers, optimizers=[first, second])
    ignored = [label.split()[-1], "1.bias"]
    check_sync(layers, optimizers=[first, second], ignore=ignored)
    if "state" in label:
        assert check_sync(layers) == held
    return str(caught.value)


@pytest.mark.parametrize("case", range(len(DIFFERENCES)))
@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_one_text_on_every_rank_names_the_first_difference(ranks, backend, case):
    _, _, label, text = DIFFERENCES[case]
    text = f"{label} is not the same on all ranks: {text.format('torch.float32 ()')}"
    (found,) = set(ranks(backend, 3)(differing, case))
    assert found == text


def returned(world):
    return check_sync(model()), check_sync(model(0.25))


def test_equal_ranks_get_the_checksum_of_their_parameters(ranks):
    ((one, other),) = set(ranks("gloo", 3)(returned))
    assert one != other
    assert len(one) == len(other) == 16


# Reducer(check_every=N) -------------------------------------------------------------------------


def training(every, kind=torch.optim.SGD, **options):
    """A model, its Reducer, its optimizer, and a function that takes a step."""
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


def gathers(step):
    """How many all_gathers a step issues."""
    called, original = [], dist.all_gather
    dist.all_gather = lambda *args, **options: (called.append(1), original(*args, **options))[1]
    try:
        step()
    finally:
        dist.all_gather = original
    return len(called)


def of_a_parameter(world):
    """After the error the next step averages."""
    ours, _, _, step = training(2)
    assert [gathers(step) for _ in range(5)] == [0, 1, 0, 1, 0]
    if world.rank == 1:
        with torch.no_grad():
            ours[1].weight[0, 2] += 2
    text = r"^average 6: parameter 1.weight is not .*: \[1\] differ from rank 0 by up to 2$"
    with pytest.raises(RuntimeError, match=text):
        step()
    step()


def of_a_state(world):
    for kind in (torch.optim.SGD, ddp.SGD):
        ours, _, optimizer, step = training(3, kind, momentum=0.5)
        for _ in range(5):
            step()
        if world.rank == 2:
            optimizer.state[ours[0].bias]["momentum_buffer"][1] -= 1
        text = (
            rf"average 6: momentum_buffer{OF} 0.bias is not .*\[2\] differ from rank 0 by up to 1"
        )
        with pytest.raises(RuntimeError, match=text):
            step()


def by_a_step_that_a_rank_leaves_out(world):
    ours, _, optimizer, _ = training(1, torch.optim.Adam)
    ours(torch.ones(4, 2)).sum().backward()
    if world.rank != 1:
        optimizer.step()
    loss = ours(torch.ones(4, 2)).sum()
    with pytest.raises(RuntimeError, match=r"average 2: parameter 0.weight .*: \[1\] differ"):
        loss.backward()


def not_by_what_one_rank_does_alone(world):
    ours, reducer, _, step = training(1)
    step()
    if world.rank == 0:  # an evaluation, and a backward pass of its own: nobody waits
        with torch.no_grad():
            assert gathers(lambda: ours(torch.ones(1, 2))) == 0
        with reducer.no_sync():
            assert gathers(lambda: ours(torch.ones(1, 2)).sum().backward()) == 0
    step()


def not_by_ranks_without_data(world):
    """They hold parameters of earlier steps until the end."""
    ours, reducer, _, step = training(2)
    with ddp.join(reducer):
        for _ in range(3 + 2 * world.rank):
            step()
    assert reducer.iteration == 7
    check_sync(ours)


def and_keeps_no_optimizer_alive(world):
    _, _, optimizer, step = training(1)
    step()
    gone = weakref.ref(optimizer)
    del optimizer, step
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="check_every must be 1 or more, got 0"):
        Reducer(nn.Linear(1, 1), check_every=0)


@pytest.mark.parametrize(
    "drift",
    [
        *(of_a_parameter, of_a_state, by_a_step_that_a_rank_leaves_out),
        *(not_by_what_one_rank_does_alone, not_by_ranks_without_data),
        and_keeps_no_optimizer_alive,
    ],
)
@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_reducer_finds_drift(ranks, backend, drift):
    ranks(backend, 3)(drift)
