"""8-bit messages between machines: their arithmetic, then on real ranks."""

import copy
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.backend.mpi_group import MPITransport
from ddp_from_scratch.backend.reduction import CHUNK
from ddp_from_scratch.backend.transport import GlooTransport
from ddp_from_scratch.core.bucket import FlatBucket
from ddp_from_scratch.options import comm_hooks
from ddp_from_scratch.options.blockwise import BLOCK, Blockwise, Int8State, Message
from ddp_from_scratch.options.comm_hooks import int8_blockwise
from tests.support.machines import group_over, machines
from tests.support.on_ranks import on
from tests.support.terms import is_rank_0s
from tests.support.tiers import slow

NONE = torch.empty(0, dtype=torch.int64)
INF, NAN = float("inf"), float("nan")


def sent(values, exact=NONE):
    """The message of these values, what arrives, and what rounding has left."""
    message, left, arrived = Message(values.numel(), exact), values.clone(), values.clone()
    message.pack(left)
    message.unpack(arrived)
    return message, arrived, left


# Messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000, CHUNK + BLOCK + 3])
@pytest.mark.parametrize("size", [1e-35, 1.0, 1e35])
def test_a_value_is_rounded_to_the_254th_part_of_its_block_s_largest(numel, size):
    values = size * torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    message, arrived, left = sent(values)
    blocks = -(-numel // BLOCK)
    assert message.payload.numel() == numel + 4 * blocks
    padded = torch.zeros(blocks * BLOCK)
    padded[:numel] = values
    largest = padded.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)[:numel]
    assert ((arrived - values).abs() <= largest / 254 * (1 + 1e-5)).all()
    torch.testing.assert_close(arrived + left, values)
    assert message.is_finite()


def test_multiples_of_the_scale_are_exact():
    values = 3.0 * torch.arange(-127.0, 128.0)
    _, arrived, left = sent(values)
    assert torch.equal(arrived, values)
    assert left.eq(0).all()


@pytest.mark.parametrize("value", [0.0, 1e-44, -1e-39])
def test_a_block_of_zeros_or_of_nearly_nothing_is_sent_as_zeros(value):
    values = torch.cat([torch.full((BLOCK,), value), torch.ones(BLOCK)])
    message, arrived, left = sent(values)
    assert arrived.tolist() == [0.0] * BLOCK + [1.0] * BLOCK
    assert torch.equal(left[:BLOCK], values[:BLOCK])
    assert message.is_finite()


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [BLOCK + 3, 2 * BLOCK + 1])
def test_a_value_that_is_not_finite_stays_so_with_its_block_alone(value, place):
    values = torch.ones(2 * BLOCK + 5)
    values[place] = value
    message, arrived, _ = sent(values)
    assert not message.is_finite()
    assert not arrived[place].isfinite()
    begin = place // BLOCK * BLOCK
    assert not arrived[begin : begin + BLOCK].isfinite().any()
    arrived[begin : begin + BLOCK] = 1.0
    assert arrived.eq(1.0).all()


def test_some_elements_are_sent_in_float32_and_coarsen_no_others():
    values = torch.arange(-127.0, 128.0)
    exact = torch.tensor([0, 7, 254])
    values[exact] = torch.tensor([1e30, 1e-30, 1 + 2**-20])
    values[1] = 127.0
    message, arrived, left = sent(values, exact)
    assert torch.equal(arrived, values)
    assert left.eq(0).all()
    assert message.payload.numel() == 255 + 4 + 3 * 4
    values[7] = INF
    assert not sent(values, exact)[0].is_finite()


def test_messages_are_added():
    exact, total = torch.tensor([3]), torch.zeros(300)
    values = [float(k) * torch.ones(300) for k in (1, 2, 3)]
    for each in values:
        sent(each, exact)[0].add_to(total)
    assert total.eq(6).all()


# The exchange, without processes --------------------------------------------------------------


def crossed(parts, crossings, begin=0):
    """Every rank's part after an exchange between all."""
    size, results = len(parts), [part.clone() for part in parts]
    running = [
        crossing.exchanges(result, begin, rank, size)
        for rank, (crossing, result) in enumerate(zip(crossings, results, strict=True))
    ]
    for rounds in zip(*running, strict=True):
        for source, (tensors, _) in enumerate(rounds):
            for target, (_, received) in enumerate(rounds):
                if source != target:
                    received[source].copy_(tensors[target])
    return results


def crossings_of(size, exact=NONE):
    return [Blockwise(exact, {}, 1 / size) for _ in range(size)]


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 40, 3000])
def test_all_ranks_get_the_same_bits_near_the_average(size, numel):
    parts = [drawn(rank, numel) for rank in range(size)]
    results = crossed(parts, crossings_of(size))
    assert all(torch.equal(result, results[0]) for result in results)
    mean = torch.stack(parts).mean(0)
    # Of the sum, once from each rank, and once from the owner.
    largest = sum(part.abs().max() for part in parts)
    assert (results[0] - mean).abs().max() <= 2 * largest / 254 / size


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_lost_for_good(size):
    """The sum of all averages is the true one, but for the errors that ranks still keep."""
    exact = torch.tensor([0, 5, 999])
    crossings, true, found = crossings_of(size, exact), torch.zeros(1000), torch.zeros(1000)
    for step in range(50):
        parts = [drawn(100 * step + rank, 1000) for rank in range(size)]
        true += torch.stack(parts).sum(0)
        found += size * crossed(parts, crossings, begin=0)[0]
    kept = torch.stack([crossing.errors[0] for crossing in crossings]).sum(0)
    assert (found - true).abs().max() > 1e-3
    torch.testing.assert_close(found + kept, true, rtol=0, atol=1e-4)
    assert kept[exact].eq(0).all()
    # What ranks keep does not grow.
    assert kept.abs().max() < 2 * size * 5 / 254


def test_a_constant_gradient_is_the_mean_of_its_averages():
    parts, crossings = [drawn(rank, 500) for rank in range(2)], crossings_of(2)
    mean = torch.stack(parts).mean(0)
    single = crossed(parts, crossings_of(2))[0]
    steps = 200
    total = sum(crossed(parts, crossings)[0] for _ in range(steps))
    once, often = ((found - mean).abs().max() for found in (single, total / steps))
    assert often < 2 * once / steps * 5 < once


@pytest.mark.parametrize("value", [INF, NAN])
def test_an_overflow_on_one_rank_is_everybodys_and_is_not_remembered(value):
    first, second = ([drawn(10 * step + rank, 600) for rank in range(2)] for step in range(2))
    results = []
    for overflows in (False, True):
        crossings = crossings_of(2)
        crossed(first, crossings)
        if overflows:
            wrong = [part.clone() for part in first]
            wrong[1][3] = value
            assert not any(result.isfinite().all() for result in crossed(wrong, crossings))
        results.append(crossed(second, crossings)[0])
    assert torch.equal(*results)


def test_errors_of_a_part_of_another_size_are_dropped():
    parts, crossings = [drawn(rank, 500) for rank in range(2)], crossings_of(2)
    crossed(parts, crossings)
    shorter = [part[:400] for part in parts]
    found = crossed(shorter, crossings)
    assert torch.equal(found[0], crossed(shorter, crossings_of(2))[0])
    assert crossings[0].errors[0].numel() == 400


# On ranks -------------------------------------------------------------------------------------


class Given(nn.Module):
    """The gradients of the parameters are what the model is called with."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(40, 30))
        self.bias = nn.Parameter(torch.zeros(7))
        self.second = nn.Parameter(torch.zeros(5, 4, 3, 3))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, *gradients):
        pairs = zip(self.parameters(), gradients, strict=False)
        return sum((parameter * gradient).sum() for parameter, gradient in pairs)


def gradients_of(rank, step=0):
    shapes = [parameter.shape for parameter in Given().parameters()]
    return [drawn(1000 * step + 10 * rank + i, *shape) for i, shape in enumerate(shapes)]


def ranks_here(world, sizes):
    """The ranks of this rank's machine."""
    mine = machines(sizes, world.rank)
    return [rank for rank in range(world.world_size) if machines(sizes, rank) == mine]


def hooked(group=None, **options):
    model, state = Given(), Int8State(group)
    reducer = Reducer(model, group, **options)
    reducer.register_comm_hook(state, int8_blockwise)
    return model, state, reducer


def averages(model, gradients):
    model.zero_grad()
    model(*gradients).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def check_near(found, world, step):
    """Vectors are exact but for the order of sums; all ranks have the same bits."""
    each = zip(*(gradients_of(rank, step) for rank in range(world.world_size)), strict=True)
    for average, terms in zip(found, each, strict=True):
        mean = torch.stack(terms).mean(0)
        loose = sum(term.abs().max() for term in terms) / 254 if mean.dim() > 1 else 1e-6
        assert (average - mean).abs().max() <= 2 * loose
        assert is_rank_0s(average)


SEVERAL = [("gloo-3", (2, 1)), ("mpi-2", (1, 1)), slow("gloo-4", (2, 2)), slow("mpi-3", (1, 2))]
LAYOUTS = ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0, "overlap": False})


@pytest.mark.parametrize(("crew", "sizes"), SEVERAL, indirect=["crew"])
@on("crew")
def test_averages_between_machines(world, sizes):
    for options in LAYOUTS:
        model, _, _ = hooked(group_over(world, sizes), **options)
        for step in range(3):
            check_near(averages(model, gradients_of(world.rank, step)), world, step)


@on("gloo-3")
def test_averages_by_messages_alone(world):
    for options in LAYOUTS:
        model, _, _ = hooked(shared_memory=False, **options)
        for step in range(3):
            check_near(averages(model, gradients_of(world.rank, step)), world, step)


@pytest.mark.parametrize(("crew", "sizes"), SEVERAL, indirect=["crew"])
@on("crew")
def test_within_a_machine_sums_are_exact(world, sizes):
    """A machine's sum has integers that 8 bits can hold; the gradients of its ranks have not."""
    model, _, _ = hooked(group_over(world, sizes))
    here = ranks_here(world, sizes)
    shapes = [parameter.shape for parameter in model.parameters()]
    for step in range(3):
        # The largest of each block, whatever the blocks.
        integers = [127 * drawn(step, shape.numel()).sign() for shape in shapes]
        # Of which nothing is left in the machine's sum.
        noise = [drawn(step, *shape).mul(1024).round().div(1024) for shape in shapes]
        place = here.index(world.rank)
        sign = 0 if len(here) == 1 else (1, -1)[place]
        gradients = [
            (world.world_size * i.view(shape) + sign * n)
            for i, n, shape in zip(integers, noise, shapes, strict=True)
        ]
        for average, i in zip(averages(model, gradients), integers, strict=True):
            assert torch.equal(average.flatten(), i * world.world_size)


@pytest.mark.parametrize("view", [False, True])
@on("crew")
def test_on_one_machine_the_bits_are_those_of_the_average(world, view):
    model, plain = hooked(gradient_as_bucket_view=view)[0], Given()
    Reducer(plain)
    for step in range(2):
        found, expected = (averages(m, gradients_of(world.rank, step)) for m in (model, plain))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


class Counted:
    """Bytes that this rank has sent to ranks of other machines."""

    nbytes = 0


@contextmanager
def counted(world, sizes):
    """Counts the bytes of messages between machines, through whichever transport."""
    count = Counted()

    def note(targets, tensors):
        for target, tensor in zip(targets, tensors, strict=True):
            if machines(sizes, target) != machines(sizes, world.rank):
                count.nbytes += tensor.nbytes

    def spied(kind):
        original = kind.exchange

        def exchange(transport, tensors, received):
            note(transport.world_ranks, tensors)
            original(transport, tensors, received)

        return patch.object(kind, "exchange", exchange)

    def exchange(group, tensors, received, original=comm_hooks.exchange):
        note(range(world.world_size), tensors)
        return original(group, tensors, received)

    with spied(GlooTransport), spied(MPITransport), patch.object(comm_hooks, "exchange", exchange):
        yield count


def bytes_of_all(count):
    total = torch.tensor(count.nbytes)
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize(("crew", "sizes"), SEVERAL, indirect=["crew"])
@on("crew")
def test_a_quarter_of_the_bytes_crosses(world, sizes):
    group, sent_bytes = group_over(world, sizes), {}
    for hook in (comm_hooks.average, comm_hooks.bf16_compress_hook, int8_blockwise):
        model = nn.Linear(600, 500, bias=False)
        reducer = Reducer(model, group)
        reducer.register_comm_hook(Int8State(group) if hook is int8_blockwise else group, hook)
        model(torch.ones(1, 600)).sum().backward()
        with counted(world, sizes) as count:
            model(torch.ones(1, 600)).sum().backward()
        sent_bytes[hook] = bytes_of_all(count)
        reducer.remove()
    full, half, quarter = sent_bytes.values()
    # gloo itself sends what no transport sees.
    if full:
        assert full == 2 * (len(sizes) - 1) * 300_000 * 4
        assert half == full / 2
    blocks = 300_000 // 256 + len(sizes) * min(sizes)
    assert 0 < quarter <= 2 * (len(sizes) - 1) * (300_000 + 4 * blocks) <= 0.27 * 1_200_000 * 2


@on("gloo-2")
def test_other_dtypes_and_vectors_alone_are_averaged_in_full(world):
    group, state = group_over(world, (1, 1)), Int8State()
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        found = []
        for hook in (int8_blockwise, comm_hooks.allreduce_hook):
            torch.manual_seed(0)
            model = nn.Linear(30, 20, bias=False, dtype=dtype)
            torch.manual_seed(world.rank)
            state.process_group = group
            named = state if hook is int8_blockwise else group
            Reducer(model, group).register_comm_hook(named, hook)
            model(torch.randn(3, 30, dtype=dtype)).abs().sum().backward()
            found.append(model.weight.grad)
        assert torch.equal(*found)
    model = nn.LayerNorm(1000)
    Reducer(model, group).register_comm_hook(state, int8_blockwise)
    model(torch.full((1, 1000), 1.0)).sum().backward()
    assert model.bias.grad.eq(1.0).all()
    assert state.state_dict(model) == {"errors": {}}


@on("gloo-3")
def test_with_no_sync_and_unused_parameters(world):
    group, r = group_over(world, (2, 1)), world.rank
    model, _, reducer = hooked(group, find_unused_parameters=True)
    for _ in range(4):
        model.zero_grad()
        with reducer.no_sync():
            model(torch.full((40, 30), r + 1.0)).backward()
        # The second matrix is used by rank 2 alone, the scale by none.
        others = (torch.ones(7), torch.full((5, 4, 3, 3), 127.0)) if r == 2 else ()
        model(torch.full((40, 30), r + 1.0), *others).backward()
        # Equal values are the largest of their block: a multiple of the scale.
        torch.testing.assert_close(model.first.grad, torch.full((40, 30), 4.0))
        torch.testing.assert_close(model.bias.grad, torch.full((7,), 1 / 3))
        torch.testing.assert_close(model.second.grad, torch.full((5, 4, 3, 3), 127 / 3))
        assert model.scale.grad is None


@pytest.mark.parametrize("shard", ["node", "world"])
@on("gloo-3")
def test_divided_steps(world, shard):
    model, _, reducer = hooked(group_over(world, (2, 1)))
    optimizer = ddp.SGD(model.parameters(), lr=1.0, reducer=reducer, shard=shard)
    found = averages(model, gradients_of(world.rank))
    optimizer.step()
    for parameter, average in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.detach(), -average)
    with pytest.raises(RuntimeError, match="cannot go through a comm hook"):
        optimizer.backward_and_step(model(*gradients_of(world.rank)))


# The state ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("crew", "sizes"), SEVERAL, indirect=["crew"])
@on("crew")
def test_a_loaded_state_gives_the_same_bits(world, sizes):
    def later(model):
        return [a for s in (2, 3) for a in averages(model, gradients_of(world.rank, s))]

    group = group_over(world, sizes)
    model, state, reducer = hooked(group)
    for step in range(2):
        averages(model, gradients_of(world.rank, step))
    saved = copy.deepcopy(state.state_dict(model))
    here = ranks_here(world, sizes)
    assert len(saved["errors"]) == (here.index(world.rank) < min(sizes))
    expected = later(model)
    for loads in (True, False):
        other, loaded, _ = hooked(group, ready_order=reducer.ready_order)
        if loads:
            loaded.load_state_dict(other, saved)
            loaded.rescale(0.5)  # as the loss scale changes
            loaded.rescale(2.0)
        same = [torch.equal(*pair) for pair in zip(expected, later(other), strict=True)]
        assert all(same) == loads


@on("gloo-2")
def test_a_rank_keeps_errors_of_what_it_sends_in_the_present_layout(world):
    model, state, reducer = hooked(group_over(world, (1, 1)), bucket_cap_mb=0)
    for step in range(3):
        averages(model, gradients_of(world.rank, step))
        errors = state.state_dict(model)["errors"]
        assert sorted(place[1:] for place in errors) == [("first",), ("second",)]
    reducer.remove()
    Reducer(model, state.process_group).register_comm_hook(state, int8_blockwise)
    for step in range(3):
        averages(model, gradients_of(world.rank, step))
    ((_, *names),) = state.state_dict(model)["errors"]
    assert {*names} == {name for name, _ in model.named_parameters()}


@on("gloo-2")
def test_a_step_that_failed_leaves_the_errors(world):
    model, state, reducer = hooked(group_over(world, (1, 1)))
    averages(model, gradients_of(world.rank))
    averages(model, gradients_of(world.rank))
    before = copy.deepcopy(state.state_dict(model))["errors"]
    with (
        patch.object(comm_hooks, "wait_all", side_effect=RuntimeError("lost")),
        pytest.raises(RuntimeError, match="lost"),
    ):
        averages(model, gradients_of(world.rank, 1))
    reducer.core.abort_step()  # which waits again
    (found,), (expected,) = (e.values() for e in (state.state_dict(model)["errors"], before))
    assert torch.equal(found, expected)
    check_near(averages(model, gradients_of(world.rank, 2)), world, 2)


def test_a_state_of_another_module_is_refused():
    saved = {"errors": {(0, "weight", "absent"): torch.ones(3)}}
    with pytest.raises(ValueError, match=r"^the state has an error of absent, the module no such"):
        Int8State().load_state_dict(nn.Linear(1, 1), saved)


def test_another_state_and_another_device_are_refused():
    bucket = FlatBucket([0], [nn.Parameter(torch.zeros(2, 2, device="meta"))], name="bucket 0")
    with pytest.raises(TypeError, match=r"must be a ddp\.comm_hooks\.Int8State, got None$"):
        int8_blockwise(None, bucket)
    with pytest.raises(RuntimeError, match=r"on a CPU .*, and bucket 0 is on meta: use bf16"):
        int8_blockwise(Int8State(), bucket)


@on("gloo-2")
def test_virtual_ranks_and_sums_refuse_it(world):
    for options in ({"virtual_ranks": 2}, {"reduce": "sum"}):
        with pytest.raises(RuntimeError, match="cannot be used with a comm hook"):
            hooked(**options)
