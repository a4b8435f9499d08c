"""What a bucket sends, on real ranks: ours, and torch's own hooks unchanged.

Rank r contributes n (r + 1) with n the world size: the average is exact, also over 3 ranks.
"""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.functional import mse_loss

from ddp_from_scratch import Reducer, broadcast_parameters
from ddp_from_scratch.core.bucket import AveragePlan, FlatBucket
from ddp_from_scratch.options import comm_hooks
from ddp_from_scratch.options.blockwise import Int8State
from ddp_from_scratch.options.comm_hooks import Later
from ddp_from_scratch.options.power_sgd import PowerSGDState, power_sgd_hook
from tests.support.on_ranks import on
from tests.support.terms import Terms, assert_grads, is_rank_0s, mean, own
from tests.support.tiers import slow

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
OURS = {
    "full": comm_hooks.average,
    "full, for wrappers": comm_hooks.allreduce_hook,
    "fp16": comm_hooks.fp16_compress_hook,
    "bf16": comm_hooks.bf16_compress_hook,
}


def averaged(values: torch.Tensor, hook) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values
    bucket = FlatBucket([0], [parameter])
    plan = AveragePlan(hook)
    bucket.pack(plan)
    bucket.launch(plan)
    bucket.wait()
    bucket.unpack()
    return parameter.grad


@pytest.mark.parametrize("name", OURS)
@on("crew")
def test_average_is_exact_in_every_dtype(world, name):
    n = world.world_size
    for dtype in DTYPES:
        for numel in (0, 1, 5, 10_000):
            result = averaged(torch.full((numel,), n * (world.rank + 1), dtype=dtype), OURS[name])
            assert result.dtype == dtype
            assert torch.equal(result, torch.full_like(result, n * (n + 1) / 2)), (dtype, numel)


@on("crew")
def test_average_overflows_only_where_its_value_would(world):
    """Divided before it is summed: the sum would not be finite."""
    for value, dtype in ((6e4, torch.float16), (3e38, torch.bfloat16), (3e38, torch.float32)):
        values = torch.full((5,), value, dtype=dtype)
        torch.testing.assert_close(averaged(values.clone(), OURS["full"]), values)
    for value, name, rtol in ((6e4, "fp16", 1e-3), (3e38, "bf16", 1e-2)):
        values = torch.full((5,), value)
        torch.testing.assert_close(averaged(values.clone(), OURS[name]), values, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@on("gloo-2")
def test_compression_halves_the_bytes_and_never_adds_any(world, name):
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        for dtype in (torch.float32, torch.float64, torch.float16):
            averaged(torch.ones(4, dtype=dtype), OURS[name])
    assert [call.args[0].element_size() for call in called.mock_calls if call.args] == [2] * 3
    # Within a machine nothing is compressed: neither the gradients, of numbers that 16 bits cannot
    # hold, nor their average.
    module = nn.Linear(300, 1, bias=False)
    Reducer(module).register_comm_hook(None, OURS[name])
    x = torch.full((1, 300), 1 + (world.rank + 1) * 2**-20)
    module(x).backward()
    assert module.weight.grad.unique().item() == 1 + 1.5 * 2**-20


@pytest.mark.parametrize("declared", [False, True])
@on("gloo-2")
def test_a_hook_has_one_bucket_under_way_unless_it_declares_one_collective(world, declared):
    model = Terms(1, 1, 1)
    reducer = Reducer(model, bucket_cap_mb=0)
    told = []

    def hook(state, bucket):
        assert state is told
        told.append((bucket.index(), bucket.is_last()))

        def wait():
            told.append("wait")
            dist.all_reduce(bucket.buffer().div_(world.world_size))
            return bucket.buffer()

        return Later(wait)

    hook.one_collective = declared
    reducer.register_comm_hook(told, hook)
    buckets = [(0, False), (1, False), (2, True)]
    one_by_one = [event for bucket in buckets for event in (bucket, "wait")]
    for _ in range(2):
        told.clear()
        model.zero_grad()
        model(own(world)).backward()
        assert told == ([*buckets, *["wait"] * 3] if declared else one_by_one)
        assert_grads(model, mean(world))


@pytest.mark.parametrize("declared", [False, True])
@on("gloo-2")
def test_a_hook_divides_unless_it_declares_prescaled(world, declared):
    model = Terms(1)
    reducer = Reducer(model)
    told = []

    def hook(state, bucket):
        told.extend(bucket.buffer().tolist())
        bucket.buffer().mul_(1 if declared else 1 / world.world_size)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    hook.prescaled = declared
    reducer.register_comm_hook(None, hook)
    model(own(world)).backward()
    assert told == [own(world) / (world.world_size if declared else 1)]
    assert_grads(model, mean(world))


@on("gloo-2")
def test_a_pass_ends_when_all_of_a_hooks_collectives_are_on_their_way(world):
    """A hook's second collective comes before whatever the program sends after the pass."""
    model = Terms(1, 2, 3)
    reducer = Reducer(model, bucket_cap_mb=0, overlap=False)
    second = []

    def hook(state, bucket):
        def again():
            second.append(bucket.index())
            dist.all_reduce(bucket.buffer())
            return bucket.buffer()

        dist.all_reduce(bucket.buffer())
        return Later(again)  # computed by who waits for it

    reducer.register_comm_hook(None, hook)
    model(1.0, (2, 1)).backward()
    assert second == [0, 1]


TORCHS = {
    "fp16": (default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (default_hooks.bf16_compress_hook, 2e-2),
    "fp16 wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-3),
    "PowerSGD of full rank": (powerSGD_hook.powerSGD_hook, 1e-3),
}
if torch.__version__ >= "2.15":  # before, they are written for what nccl's futures give
    TORCHS["quantized"] = quantization_hooks.quantization_pertensor_hook, 2e-2
    TORCHS["quantized by channel"] = quantization_hooks.quantization_perchannel_hook, 2e-2


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize(
    ("crew", "view"), [("gloo-2", True), slow("mpi-2", False)], indirect=["crew"], ids=str
)
@on("crew")
def test_torchs_hooks_run_unchanged(world, name, view):
    hook, tolerance = TORCHS[name]
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    ours.append(nn.Linear(16, 1))
    theirs = copy.deepcopy(ours)
    x = torch.randn(2, 16, 8)[world.rank]
    Reducer(ours, bucket_cap_mb=1e-4)
    reducer = Reducer(theirs, bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    state = None
    if name.startswith("PowerSGD"):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0
        )
    reducer.register_comm_hook(state, hook)
    for _ in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            mse_loss(model(x), x.square().sum(1, keepdim=True) / 8).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= tolerance * p.grad.abs().max()
            assert is_rank_0s(q.grad)
    assert state is None or state.total_numel_before_compression > 0


@on("gloo-2")
def test_a_hook_that_wants_divided_gradients_may_have_any_state(world):
    def hook(state, bucket):
        state["calls"] += 1
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    hook.prescaled = hook.one_collective = True
    model, state = nn.Linear(2, 1, bias=False), {"calls": 0}
    broadcast_parameters(model)
    reducer = Reducer(model)
    reducer.register_comm_hook(state, hook)
    model(torch.full((1, 2), float(world.rank))).sum().backward()
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    assert state == {"calls": 1}
    reducer.remove()


STATES = {
    "int8": (Int8State, comm_hooks.int8_blockwise),
    "PowerSGD": (lambda: PowerSGDState(2), power_sgd_hook),
} | {name: (lambda: None, hook) for name, hook in OURS.items()}


@pytest.mark.parametrize("messages", [False, slow(True)])
@pytest.mark.parametrize("name", STATES)
@on("gloo-3")
def test_a_hook_without_a_group_averages_over_the_ranks_of_its_reducer(world, name, messages):
    """And the rank outside of them need not take part."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group, ranks = (groups[1], [1]) if world.rank == 1 else (groups[0], [0, 2])
    model = nn.Linear(40, 40, bias=False)
    nn.init.zeros_(model.weight)
    reducer = Reducer(model, group, shared_memory=not messages)
    make_state, hook = STATES[name]
    reducer.register_comm_hook(make_state(), hook)
    for _ in range(3 if world.rank == 1 else 2):
        model.zero_grad()
        model(torch.full((1, 40), world.rank + 1.0)).sum().backward()
    expected = torch.full((40, 40), sum(rank + 1.0 for rank in ranks) / len(ranks))
    torch.testing.assert_close(model.weight.grad, expected, rtol=0.01, atol=0.0)
    reducer.remove()
