"""Checksums; ranks that hold the same bits, and ranks that do not."""

import gc
import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer, check_sync
from ddp_from_scratch.sync.checksums import checksums, kind_of
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


def quantised(values):
    return torch.quantize_per_tensor(values, 0.5, 3, torch.qint8)


def by_channel(values):
    scales, zeros = torch.tensor([0.5, 1.0]), torch.tensor([0, 1])
    return torch.quantize_per_channel(values, scales, zeros, 0, torch.quint8)


KINDS = {
    "quantised": quantised,
    "by channel": by_channel,
    "frozen": lambda values: nn.Parameter(quantised(values), requires_grad=False),
    "coo": lambda values: values.to_sparse(),
    "csr": lambda values: values.to_sparse_csr(),
    "csc": lambda values: values.to_sparse_csc(),
    "bsr": lambda values: values.to_sparse_bsr((1, 2)),
    "mkldnn": lambda values: values.to_mkldnn(),
    "nested": lambda values: torch.nested.nested_tensor([values[0], values[1, :2]]),
    "jagged": lambda values: torch.nested.nested_tensor([*values], layout=torch.jagged),
    "negated": lambda values: torch.complex(values, values).conj().imag,
    "conjugated": lambda values: torch.complex(values, values).conj(),
    "half complex": lambda values: torch.complex(values, values).to(torch.complex32),
    "unsigned": lambda values: values.to(torch.uint16),
}


@pytest.mark.filterwarnings("ignore")  # some kinds are prototypes
@pytest.mark.parametrize("kind", KINDS)
def test_checksums_of_every_kind_of_tensor(kind):
    values = torch.arange(8.0).view(2, 4)
    changed = values.clone()
    changed[1, 1] = 2.0
    make = KINDS[kind]
    first, again, other = checksums([make(values), make(values), make(changed)])
    assert first == again != other
    assert kind_of(make(values)) == kind_of(make(changed))


def test_scales_and_places_are_part_of_a_checksum():
    ones = torch.ones(3)
    half = torch.quantize_per_tensor(ones * 0.5, 0.25, 3, torch.qint8)
    assert torch.equal(half.int_repr(), quantised(ones).int_repr())
    sparse = [torch.zeros(3).index_fill(0, torch.tensor(n), 1.0).to_sparse() for n in (0, 2)]
    found = checksums([quantised(ones), half, *sparse])
    assert len(set(found)) == 4


def test_tensors_without_data_have_no_checksum():
    lazy = nn.parameter.UninitializedParameter()
    assert checksums([torch.ones(2, device="meta"), lazy, torch.ones(0)]) == [0, 0, 0]
    assert [kind_of(lazy), kind_of(torch.ones(2).to_sparse())] == [
        "torch.float32, lazy",
        "torch.float32 (2,), torch.sparse_coo",
    ]


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


def more_state(here):
    here.weight["more"] = torch.ones(1)


def no_state(here):
    here.first.state[here.layers[1].bias].clear()


def sparse(here):
    here.weight["sparse"].values().add_(3)


def settings(here):
    here.first.param_groups[0].update(lr=0.5, momentum=0.25)


def step_and_parameter(here):
    here.bias["step"].add_(3)
    here.layers[2].bias.fill_(7)


OF = " in the state of the optimizer for parameter"
SHARD = "shard in the state of optimizer 2 for parameter 0.bias"
ONE, TWO = ("[1] differ from rank 0 by up to ", "[2] differ from rank 0 by up to ")
FIRST, BOTH = "[1] differ from rank 0", "[1, 2] differ from rank 0"
KEYS = "list.0, deep.n, deep.yes, sparse"
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
    (1, sparse, f"sparse{OF} 0.weight", ONE + "3"),
    (1, more_state, OF[4:] + " 0.weight", f"{FIRST}: {KEYS} there, {KEYS}, more on rank 1"),
    (0, no_state, OF[4:] + " 1.bias", f"{BOTH}: nothing there, moment, step on rank 1"),
    (1, settings, "lr of the optimizer", f"{FIRST}: 1.0 there, 0.5 on rank 1"),
]


def differing(world, odd, change, label):
    """Two optimizers have states of every kind; the second one, sharded, has one on ranks 1, 2."""
    layers = model()
    first = torch.optim.SGD(layers.parameters(), 1.0)
    second = torch.optim.SGD([layers[0].bias if world.rank else layers[0].weight], 1.0)
    weight = first.state[layers[0].weight] = {
        "list": [torch.ones(3, dtype=torch.complex64), None],
        "text": object(),
        "deep": {"n": 1, "yes": True},
        "sparse": torch.ones(2).to_sparse().coalesce(),
    }
    bias = first.state[layers[1].bias] = {"moment": torch.ones(2), "step": torch.tensor(3.0)}
    shard = {"shard": torch.ones(2)}
    if world.rank > 0:
        second.state[layers[0].bias] = shard
    held = check_sync(layers)
    assert held == check_sync(layers, optimizers=[first, second])
    if world.rank == odd:
        with torch.no_grad():
            state = {"weight": weight, "bias": bias, "shard": shard}
            change(SimpleNamespace(layers=layers, first=first, **state))
    told = text_of(RuntimeError, check_sync, layers, optimizers=[first, second])
    if "lr" not in label:
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


def with_setting(values):
    def make(world, layers):
        return [torch.optim.SGD([{"params": layers.parameters(), "kind": values[world.rank]}], 1.0)]

    return make


def with_text(world, layers):
    optimizer = torch.optim.SGD(layers.parameters(), 1.0)
    optimizer.state[layers[0].bias] = {"kind": {"of": "ab"[world.rank]}}
    return [optimizer]


def in_other_groups(world, layers):
    layers = reversed(layers) if world.rank else layers
    return [torch.optim.SGD([{"params": layer.parameters()} for layer in layers], 1.0)]


def in_fewer_groups(world, layers):
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters()}]
    one = [{"params": layers[:2].parameters()}]
    return [torch.optim.SGD(one if world.rank else groups, 1.0)]


def of_another_class(world, layers):
    return [(torch.optim.Adam if world.rank else torch.optim.SGD)(layers.parameters(), 1.0)]


def one_more(world, layers):
    return [torch.optim.SGD(layers.parameters(), 1.0) for _ in range(1 + world.rank)]


KIND = "kind of the optimizer"
UNLIKE = [
    (with_setting([{"a": 1, "b": [2]}, {"a": 1, "b": [3]}]), KIND, "{a: 1.0, b: (2.0)}"),
    (with_setting([{"one", "two"}, {"one"}]), KIND, "{'one', 'two'}"),
    (with_setting([numpy.ones(2), numpy.zeros(2)]), KIND, "(1.0, 1.0)"),
    (with_setting([torch.float32, torch.float64]), KIND, "torch.float32"),
    (with_setting([[1] * 99, [1] * 98 + [2]]), KIND, "(1.0, "),
    (with_text, "kind.of in the state of the optimizer for parameter 0.bias", "'a' there, 'b' on"),
    (in_other_groups, "the group of 0.weight in the optimizer", "0 there, 2 on"),
    (in_fewer_groups, "the group of 1.weight in the optimizer", "1 there, 0 on"),
    (of_another_class, "the class of the optimizer", "SGD there, Adam on"),
    (one_more, "the number of optimizers", "1 there, 2 on"),
]


def unlike(world):
    layers = model()
    for values in ([{1, 2}, {2, 1}], [numpy.float32(1), 1.0], [object(), object()]):
        check_sync(layers, optimizers=with_setting(values)(world, layers))
    return [
        text_of(RuntimeError, check_sync, layers, optimizers=make(world, layers))
        for make, *_ in UNLIKE
    ]


def test_unlike_optimizers_are_named(ranks):
    one, other = ranks("gloo", 2)(unlike)
    assert one == other
    for text, (_, label, kinds) in zip(one, UNLIKE, strict=True):
        assert text.startswith(f"{label} is not the same on all ranks: {FIRST}: {kinds}")
        assert len(text) < 400


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


def of_the_optimizers_that_all_have_stepped(world):
    """One rank keeps an optimizer, ranks step two in another order, and one steps one more."""
    ours, _, kept, step = training(1, momentum=0.5)
    step()
    kept.param_groups[0]["lr"] = 0.5 + world.rank
    if world.rank:
        del kept, step
        gc.collect()
    layers = [torch.optim.SGD(layer.parameters(), lr=0.125, momentum=0.5) for layer in ours]
    alone = torch.optim.Adam([ours[0].bias], lr=0.0)

    def backward():
        ours(torch.ones(4, 2)).sum().backward()

    def step_all():
        backward()
        for layer in layers if world.rank else layers[::-1]:
            layer.step()
        if world.rank:
            alone.step()

    ours.zero_grad()
    for _ in range(3):
        step_all()
    backward()
    layers[1].param_groups[0]["lr"] += world.rank
    backward()  # no optimizer has stepped since
    layers[1].param_groups[0]["lr"] = 0.125
    step_all()
    layers[1].param_groups[0]["lr"] += world.rank
    text = "^average 8: lr of the SGD of 1.bias to 1.weight, 2 in all is not .*: 0.125 there, 1.125"
    with pytest.raises(RuntimeError, match=text):
        backward()


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
        ("gloo", of_the_optimizers_that_all_have_stepped),
        ("gloo", not_by_ranks_without_data),
    ],
)
def test_a_reducer_finds_drift(ranks, backend, drift):
    ranks(backend, 3)(drift)
