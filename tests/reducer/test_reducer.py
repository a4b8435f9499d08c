"""The Reducer on real ranks: exact averages, launched in order, and loud where it could drift.

Rank r's input is n (r + 1) with n the world size, so every average is exact and no term is: the
gradient of parameter p_k of `Terms` is k + 1 times the input, its average (k + 1) n (n + 1) / 2.
"""

import copy
import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.buckets import packing

BYTES = 2**-20  # in bucket_cap_mb


@pytest.fixture(params=["gloo-2", "gloo-3", "mpi-2", "mpi-3"])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


@pytest.fixture(params=["gloo", "mpi"])
def pair(ranks, request):
    return ranks(request.param, 2)


@pytest.fixture(params=["gloo", "mpi"])
def trio(ranks, request):
    return ranks(request.param, 3)


class Terms(nn.Module):
    """The sum over k of (k + 1) x sum(p_k); gradients become ready in reverse order of `use`."""

    def __init__(self, *sizes: int, dtypes: Sequence[torch.dtype] = (torch.float32,)):
        super().__init__()
        for k, size in enumerate(sizes):
            values = torch.zeros(size, dtype=dtypes[k % len(dtypes)])
            self.register_parameter(f"p{k}", nn.Parameter(values))

    def forward(self, x: float, use: Sequence[int] | None = None) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in range(len(self._parameters)) if use is None else use:
            total = total + (getattr(self, f"p{k}") * (k + 1) * x).sum().real.double()
        return total


def own(world) -> float:
    return float(world.world_size * (world.rank + 1))


def mean(world) -> float:
    return world.world_size * (world.world_size + 1) / 2


def assert_grads(model: nn.Module, x: float) -> None:
    """The gradients are those of `Terms` at input `x`, exactly."""
    for name, p in model.named_parameters():
        k = int(name[-1])
        assert torch.equal(p.grad, torch.full_like(p, (k + 1) * x)), f"{name}: {p.grad}"


@contextmanager
def recorded(name: str) -> Iterator[list[int]]:
    """The numbers of elements of the tensors with which torch.distributed's `name` is called."""
    called: list[int] = []
    original = getattr(dist, name)

    def record(tensor, *args, **options):
        called.append(tensor.numel())
        return original(tensor, *args, **options)

    setattr(dist, name, record)
    try:
        yield called
    finally:
        setattr(dist, name, original)


# Exact averages ---------------------------------------------------------------------------------

CAPS = {"each its own": 0, "12 bytes": 12 * BYTES, "default": None, "all in one": math.inf}
each_cap = pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS.keys())
each_overlap = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "at the end"])
each_view = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


def average(world, cap, overlap, view):
    for set_to_none in (True, False):
        model = Terms(1, 2, 3, 4)
        Reducer(model, bucket_cap_mb=cap, overlap=overlap, gradient_as_bucket_view=view)
        for step in (1, 2, 3):
            model.zero_grad(set_to_none=set_to_none)
            model(step * own(world)).backward()
            assert_grads(model, step * mean(world))


@each_cap
@each_overlap
@each_view
def test_average_is_exact_on_every_rung(crew, cap, overlap, view):
    crew(average, cap, overlap, view)


def average_of_dtypes(world, view):
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    model = Terms(3, 1, 2, 4, 2, 5, 1, dtypes=dtypes)
    reducer = Reducer(model, gradient_as_bucket_view=view)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, mean(world))
        assert len(reducer.buckets) == len(dtypes)


@each_view
def test_several_dtypes(crew, view):
    crew(average_of_dtypes, view)


def average_of_odd_shapes(world, view):
    model = Terms()
    model.p0 = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    model.p1 = nn.Parameter(torch.zeros(()))
    model.p2 = nn.Parameter(torch.zeros(0, 3))
    model.p3 = nn.Parameter(torch.zeros(40).as_strided((2, 3), (20, 2)))
    for cap in (0, None):
        reducer = Reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=view)
        for _ in range(3):
            model.zero_grad()
            model(own(world)).backward()
            assert_grads(model, mean(world))
        reducer.remove()


@each_view
def test_every_memory_layout(pair, view):
    pair(average_of_odd_shapes, view)


def average_of_tied(world):
    model = Terms(2, 3)
    model.p2 = model.p0  # its gradient is 1 x + 3 x
    reducer = Reducer(model, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert reducer.buckets in ((("p1",), ("p0",)), (("p0",), ("p1",)))
        assert model.p0.grad.tolist() == [4 * mean(world)] * 2
        assert model.p1.grad.tolist() == [2 * mean(world)] * 3


def test_tied_parameters(pair):
    pair(average_of_tied)


def average_of_submodules(world):
    one, two = Terms(1, 2), Terms(3, 4)
    Reducer(one, bucket_cap_mb=0)
    Reducer(two, gradient_as_bucket_view=True)
    for _ in range(3):
        one.zero_grad(), two.zero_grad()
        (one(own(world)) + two(2 * own(world))).backward()
        assert_grads(one, mean(world))
        assert_grads(two, 2 * mean(world))


def test_several_reducers_on_disjoint_submodules(pair):
    pair(average_of_submodules)


def average_in_subgroup(world):
    """Ranks 0 and 2 average 3 and 9; rank 1 goes on alone."""
    group = dist.new_group([0, 2])
    model = Terms(1, 2, 3)
    if world.rank != 1:
        Reducer(model, group, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, 6)
    dist.destroy_process_group(group)


def test_subgroup(trio):
    trio(average_in_subgroup)


def frozen_stays_local(world):
    model = Terms(1, 2)
    model.p0.requires_grad = False
    reducer = Reducer(model)
    model(own(world)).backward()
    assert reducer.buckets == (("p1",),)
    assert model.p0.grad is None
    assert model.p1.grad.tolist() == [2 * mean(world)] * 2


def test_frozen_parameters_take_no_part(pair):
    pair(frozen_stays_local)


# Collectives ------------------------------------------------------------------------------------


def collectives(world, sizes, cap, overlap, expected):
    model = Terms(*sizes)
    Reducer(model, bucket_cap_mb=cap, overlap=overlap)
    for _ in range(3):
        with recorded("all_reduce") as sent:
            model(own(world)).backward()
        assert sent == expected


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ((1, 2, 3, 4), 0, [4, 3, 2, 1]),
        ((1, 2, 3, 4), 12 * BYTES, [4, 3, 3]),
        ((1, 2, 3, 4), math.inf, [10]),
        ((1, 2**18, 2**18), None, [2**18, 2**18 + 1]),  # first 1 MiB, then 25 MiB
        ((1, 2**18, 2**18), 2, [2**19, 1]),
    ],
)
@each_overlap
def test_number_and_sizes_of_all_reduces(pair, sizes, cap, overlap, expected):
    pair(collectives, sizes, cap, overlap, expected)


def launched_during_backward(world, overlap):
    model = Terms(1, 2, 3, 4)
    with recorded("all_reduce") as sent:
        seen = []
        model.p0.register_post_accumulate_grad_hook(lambda _: seen.append(list(sent)))
        Reducer(model, bucket_cap_mb=0, overlap=overlap)
        for _ in range(2):
            sent.clear()
            model(own(world)).backward()
            assert sent == [4, 3, 2, 1]
    return seen


@each_overlap
def test_buckets_are_launched_before_backward_ends_only_with_overlap(pair, overlap):
    """Seen when the gradient of p0, the last one, becomes ready."""
    assert pair(launched_during_backward, overlap) == [[[4, 3, 2]] * 2 if overlap else [[], []]] * 2


RANK_0_USES, OTHERS_USE = (1, 3, 0, 2), (0, 1, 2, 3)


def launch_in_order(world, view):
    """Rank 0's gradients become ready as p2, p0, p3, p1, the others' as p3, p2, p1, p0."""
    model = Terms(1, 2, 3, 4)
    ready = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=view)
    use = RANK_0_USES if world.rank == 0 else OTHERS_USE
    for expected in ([4, 3, 2, 1], [3, 1, 4, 2], [3, 1, 4, 2]):
        ready.clear()
        model.zero_grad()
        with recorded("all_reduce") as sent:
            model(own(world), use).backward()
        assert ready == [f"p{k}" for k in reversed(use)]
        assert sent == expected
        assert_grads(model, mean(world))
        assert reducer.buckets == (("p2",), ("p0",), ("p3",), ("p1",))


@each_view
def test_launch_order_is_one_on_all_ranks_whatever_is_ready_first(crew, view):
    """First the reverse order of registration; rebuilt after the first step as rank 0's."""
    crew(launch_in_order, view)


def rebuild(world):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=12 * BYTES)
    before = reducer.buckets
    assert before == (("p3",), ("p2",), ("p1", "p0"))
    for expected in ([4], [], []):
        with recorded("broadcast") as sent:
            model(own(world), (3, 2, 1, 0)).backward()
        assert sent == expected
        assert reducer.buckets == (("p0", "p1"), ("p2",), ("p3",))


def test_buckets_are_rebuilt_once(pair):
    pair(rebuild)


def views_after_rebuild(world):
    model = Terms(1, 2, 3, 4)
    Reducer(model, bucket_cap_mb=math.inf, gradient_as_bucket_view=True)
    for step in (1, 2, 3):  # accumulated: never set to zero
        model(own(world), (3, 2, 1, 0)).backward()
        assert_grads(model, step * mean(world))
        ends = [p.grad.data_ptr() + p.grad.nbytes for p in model.parameters()]
        starts = [p.grad.data_ptr() for p in model.parameters()]
        in_bucket = starts[1:] == ends[:-1]  # one behind the other
        assert in_bucket == (step > 1)  # after the first step the buckets are for the second


def test_gradient_views_survive_the_rebuild(pair):
    pair(views_after_rebuild)


# Local on purpose -------------------------------------------------------------------------------


def accumulate(world, view, set_to_none):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=12 * BYTES, gradient_as_bucket_view=view)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        with recorded("all_reduce") as sent, reducer.no_sync():
            for times in (1, 2):
                model(own(world)).backward()
                assert_grads(model, times * own(world))
        assert sent == []
        model(own(world)).backward()
        assert_grads(model, 3 * mean(world))


@each_view
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(crew, view, set_to_none):
    crew(accumulate, view, set_to_none)


def no_sync_restores(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    with pytest.raises(KeyError), reducer.no_sync():
        raise KeyError
    model(own(world)).backward()
    assert_grads(model, mean(world))

    model.zero_grad()
    with reducer.no_sync():
        with reducer.no_sync():
            pass
        model(own(world)).backward()
        assert_grads(model, own(world))
    model(own(world)).backward()
    assert_grads(model, 2 * mean(world))


def test_no_sync_restores_itself_after_an_exception_and_nests(pair):
    pair(no_sync_restores)


def remove(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    model(own(world)).backward()
    reducer.remove()
    reducer.remove()
    with recorded("all_reduce") as sent:
        for use in ((0, 1), (0,), (0, 1)):
            model.zero_grad()
            model(own(world), use).backward()
    assert sent == []
    assert_grads(model, own(world))

    Reducer(model)
    model(own(world)).backward()
    assert_grads(model, 2 * mean(world))


def test_removed_is_local_until_there_is_a_new_one(pair):
    pair(remove)


def remove_in_the_middle(world):
    """With buckets under way and parameters missing."""
    model = Terms(1, 2)
    reducer = Reducer(model, bucket_cap_mb=0)
    model(own(world), use=(1,)).backward()
    reducer.remove()
    model.zero_grad()
    model(own(world)).backward()
    assert_grads(model, own(world))


def test_remove_after_half_a_backward(pair):
    pair(remove_in_the_middle)


def forward_on_rank_0_only(world):
    model = Terms(1, 2)
    Reducer(model)
    for _ in range(3):
        if world.rank == 0:
            model.eval()
            with torch.no_grad():
                model(1.0)
            model(1.0)  # with a graph, but no backward
            model.train()
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, mean(world))


def test_a_forward_on_one_rank_alone_does_not_hang(pair):
    pair(forward_on_rank_0_only)


def copied(world, in_group):
    """As of a teacher or of averaged weights: frozen, and run with gradients enabled."""
    group = dist.new_group() if in_group else None
    model = Terms(1, 2)
    Reducer(model, group)
    model(own(world)).backward()
    other = copy.deepcopy(model).requires_grad_(False)
    other(1.0)
    other.requires_grad_(True).zero_grad()
    other(own(world), (0,)).backward()
    other(own(world), (1,)).backward()
    assert_grads(other, own(world))

    model.zero_grad()
    model(own(world)).backward()
    assert_grads(model, mean(world))
    if in_group:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("in_group", [False, True])
def test_a_deep_copy_of_the_module_is_plain(pair, in_group):
    pair(copied, in_group)


def forget(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    model(own(world)).backward()
    alive = [weakref.ref(object_) for object_ in (model, reducer, model.p0)]
    del model, reducer
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


def test_a_forgotten_module_is_freed(pair):
    pair(forget)


# Unusual orders of forward and backward ---------------------------------------------------------


def two_backwards_through_one_graph(world, options):
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=0, **options)
    for _ in range(3):
        model.zero_grad()
        loss = model(own(world))
        loss.backward(retain_graph=True)
        assert_grads(model, mean(world))
        loss.backward()
        assert_grads(model, 2 * mean(world))


def forward_forward_backward_backward(world, options):
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=0, **options)
    for _ in range(3):
        model.zero_grad()
        one, two = model(own(world)), model(10 * own(world))
        one.backward()
        assert_grads(model, mean(world))
        two.backward()
        assert_grads(model, 11 * mean(world))


def loss_in_two_parts(world, options):
    for first, second in (((2, 3), (0, 1)), ((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for cap in (0, math.inf):
            model = Terms(1, 2, 3, 4)
            Reducer(model, bucket_cap_mb=cap, **options)
            for _ in range(3):
                model.zero_grad()
                one, two = model(own(world), first), model(own(world), second)
                one.backward()
                two.backward()
                assert_grads(model, mean(world))


def parts_that_share_a_parameter(world, options):
    """p0's second gradient comes before its bucket is full."""
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=math.inf, **options)
    for _ in range(3):
        model.zero_grad()
        one, two = model(own(world), (0, 1)), model(own(world), (2, 0))
        one.backward()
        two.backward()
        assert model.p0.grad.tolist() == [2 * mean(world)]
        assert model.p1.grad.tolist() == [2 * mean(world)] * 2


@pytest.mark.parametrize(
    "unusual",
    [
        two_backwards_through_one_graph,
        forward_forward_backward_backward,
        loss_in_two_parts,
        parts_that_share_a_parameter,
    ],
)
@each_overlap
@each_view
def test_unusual_order_is_right(pair, unusual, overlap, view):
    pair(unusual, {"overlap": overlap, "gradient_as_bucket_view": view})


def with_small_gradients(world, unusual, options):
    with patch.object(packing, "_SMALL", 2**15):
        unusual(world, options)


@pytest.mark.parametrize("unusual", [loss_in_two_parts, two_backwards_through_one_graph])
@each_view
def test_unusual_order_is_right_where_gradients_are_packed_together(pair, unusual, view):
    pair(with_small_gradients, unusual, {"gradient_as_bucket_view": view})


class Chain(nn.Module):
    """The same sum, where each layer's output is the next one's input and may be recomputed."""

    def __init__(self, *sizes: int):
        super().__init__()
        for k, size in enumerate(sizes):
            self.register_parameter(f"p{k}", nn.Parameter(torch.zeros(size)))

    def forward(self, start: torch.Tensor, x: float, reentrant: bool | None) -> torch.Tensor:
        total = start
        for k, p in enumerate(self.parameters()):

            def layer(total, p=p, factor=(k + 1) * x):
                return total + (p * factor).sum() + 0 * total.tanh()

            if reentrant is None:
                total = layer(total)
            else:
                total = checkpoint(layer, total, use_reentrant=reentrant)
        return total


def checkpointed(world, whole, reentrant, overlap):
    for cap in (0, 12 * BYTES, math.inf):
        model = Chain(1, 2, 3, 4)
        Reducer(model, bucket_cap_mb=cap, overlap=overlap)
        for _ in range(3):
            model.zero_grad()
            start = torch.zeros((), requires_grad=True)
            if whole:
                loss = checkpoint(model, start, own(world), None, use_reentrant=reentrant)
            else:
                loss = model(start, own(world), reentrant)
            loss.backward()
            assert_grads(model, mean(world))


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "each layer"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@each_overlap
def test_activation_checkpointing(pair, whole, reentrant, overlap):
    pair(checkpointed, whole, reentrant, overlap)


def checkpointed_in_two_calls(world, reentrant):
    """The module is run again for p0 and p1 when p2 and p3 have their gradients already."""
    model = Terms(1, 2, 3, 4)
    Reducer(model)
    x = torch.tensor(own(world), requires_grad=True)
    for _ in range(3):
        model.zero_grad()
        calls = [checkpoint(model, x, use, use_reentrant=reentrant) for use in ((0, 1), (2, 3))]
        sum(calls).backward()
        assert_grads(model, mean(world))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_in_two_calls(pair, reentrant):
    pair(checkpointed_in_two_calls, reentrant)


# Loud -------------------------------------------------------------------------------------------


def test_module_without_trainable_parameters_is_refused():
    frozen = nn.Linear(1, 1).requires_grad_(False)
    for module in (nn.ReLU(), frozen):
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            Reducer(module)


def test_negative_cap_is_refused():
    with pytest.raises(ValueError, match="bucket_cap_mb must be 0 or more, got -1"):
        Reducer(nn.Linear(1, 1), bucket_cap_mb=-1)


def missing(world, cap, overlap):
    model = Terms(1, 2, 3, 4)
    Reducer(model, bucket_cap_mb=cap, overlap=overlap)
    model(own(world)).backward()
    model(own(world), (0, 1, 3)).backward()
    named = rf"no gradient in the last backward pass on rank {world.rank} for: .*\bp2\b"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=named) as caught:
            model(own(world))
        assert cap != 0 or "p1" not in str(caught.value)


@each_cap
@each_overlap
def test_parameter_without_gradient_is_named_by_the_next_forward(pair, cap, overlap):
    pair(missing, cap, overlap)


def missing_on_one_rank(world):
    """Rank 0 waits for rank 1 in vain, so in a group with a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    model = Terms(1, 2)
    Reducer(model, group)
    if world.rank == 0:
        with pytest.raises(RuntimeError):
            model(own(world)).backward()
    else:
        model(own(world), (1,)).backward()
        with pytest.raises(RuntimeError, match="pass on rank 1 for: p0"):
            model(own(world))
    dist.barrier()
    dist.destroy_process_group(group)


def test_parameter_without_gradient_on_one_rank_is_named_there(ranks):
    ranks("gloo", 2)(missing_on_one_rank)


def missing_in_checkpoint(world, reentrant):
    model = Terms(1, 2)
    Reducer(model)
    x = torch.tensor(own(world), requires_grad=True)
    checkpoint(model, x, (0,), use_reentrant=reentrant).backward()
    with pytest.raises(RuntimeError, match=f"pass on rank {world.rank} for: p1"):
        checkpoint(model, x, (0,), use_reentrant=reentrant).backward()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_parameter_without_gradient_is_named_also_under_checkpointing(pair, reentrant):
    pair(missing_in_checkpoint, reentrant)


def missing_with_forward_in_no_sync(world):
    model = Terms(1, 2)
    reducer = Reducer(model)
    with reducer.no_sync():
        loss = model(own(world), (0,))
    loss.backward()
    named = pytest.raises(RuntimeError, match=f"pass on rank {world.rank} for: p1")
    with named, reducer.no_sync():
        model(own(world), (0,))


def test_parameter_without_gradient_is_named_also_when_only_forward_is_in_no_sync(pair):
    pair(missing_with_forward_in_no_sync)


def train_a_part_only(world):
    """Never through the module itself, so that no forward of its own can notice."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    Reducer(model, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    unrelated = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    before = model[0].weight.item()
    model[0](torch.full((1, 1), own(world))).sum().backward()
    unrelated.step()
    with pytest.raises(RuntimeError, match=rf"no gradient .* on rank {world.rank} for: 1\.weight"):
        optimizer.step()
    assert model[0].weight.item() == before


def test_an_optimizer_does_not_step_on_what_is_not_averaged(pair):
    pair(train_a_part_only)


def step_during_backward(world):
    model = Terms(1, 2)
    Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.p0.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss = model(own(world))
    with pytest.raises(RuntimeError, match=f"stepped during backward on rank {world.rank}"):
        loss.backward()


def test_an_optimizer_that_steps_during_backward_is_named(pair):
    pair(step_during_backward)


def change_requires_grad(world, before):
    model = Terms(1, 2)
    model.p1.requires_grad = before
    reducer = Reducer(model)
    model(own(world)).backward()
    model.p1.requires_grad = not before
    text = rf"parameter p1 became .* requires_grad={not before} on rank {world.rank}"
    with pytest.raises(RuntimeError, match=text):
        model(own(world))
    reducer.remove()
    Reducer(model)
    model.zero_grad()
    model(own(world)).backward()
    assert model.p0.grad.tolist() == [mean(world)]


@pytest.mark.parametrize("before", [True, False], ids=["freeze", "unfreeze"])
def test_change_of_requires_grad_is_named(pair, before):
    pair(change_requires_grad, before)


def change_dtype(world):
    """A float32 bucket would round float64 gradients without a word."""
    model = Terms(1, 2)
    Reducer(model)
    model.double()
    with pytest.raises(RuntimeError, match=r"parameter p0 became torch\.float64 on cpu"):
        model(own(world))


def test_change_of_dtype_is_named(pair):
    pair(change_dtype)


def add_parameter(world):
    model = Terms(1, 2)
    Reducer(model)
    model(own(world)).backward()
    model.p2 = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="p2"):
        model(own(world))


def test_parameter_added_after_construction_is_named(pair):
    pair(add_parameter)


def replace_parameter(world):
    model = Terms(1, 2)
    Reducer(model)
    model(own(world)).backward()
    model.p1 = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="p1"):
        model(own(world))


def test_parameter_replaced_after_construction_is_named(pair):
    pair(replace_parameter)


def remove_parameter(world):
    model = Terms(1, 2)
    Reducer(model)
    model(own(world)).backward()
    del model.p1
    with pytest.raises(RuntimeError, match=f"parameter p1 was removed on rank {world.rank}"):
        model(own(world))


def test_parameter_removed_after_construction_is_named(pair):
    pair(remove_parameter)


def second_gradient(world, cap, in_no_sync):
    model = Terms(1, 2, 3)
    reducer = Reducer(model, bucket_cap_mb=cap)
    one, two = model(own(world), (1, 2)), model(own(world), (2, 0))
    one.backward()
    context = reducer.no_sync() if in_no_sync else nullcontext()
    text = f"parameter p2 got a second gradient on rank {world.rank} "
    with pytest.raises(RuntimeError, match=text), context:
        two.backward()


@each_cap
def test_second_gradient_while_the_first_is_under_way_is_named(pair, cap):
    """It would be overwritten by the average of the first."""
    pair(second_gradient, cap, False)


def test_second_gradient_while_the_first_is_under_way_is_named_also_in_no_sync(pair):
    pair(second_gradient, 0, True)


def second_gradient_in_an_inner_pass(world, view):
    """On one rank: it raises when the other has what it waits for, and both train on."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=view)
    x = torch.full((2, 3), world.rank + 1.0)

    def loss(inner):
        h = model[0](x)
        if inner:  # the last layer's bucket is launched before this pass within the pass
            h = checkpoint(lambda h: model[2](model[1](h)), h, use_reentrant=True)
        else:
            h = model[1](h)
        return model[2](h).sum()

    for _ in range(2):
        loss(False).backward()
        model.zero_grad()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"parameter 2.* got a second gradient on rank 0"):
            loss(True).backward()
    else:
        loss(False).backward()
    model.zero_grad()
    loss(False).backward()
    assert model[2].bias.grad.tolist() == [2.0] * 3


@each_view
def test_second_gradient_in_a_pass_within_the_pass(pair, view):
    pair(second_gradient_in_an_inner_pass, view)


class Lookup(Terms):
    """p0 gets a sparse gradient, which no module has declared."""

    def forward(self, x):
        return nn.functional.embedding(torch.tensor([1, 3]), self.p0, sparse=True).sum()


def undeclared_sparse(world):
    model = Lookup()
    model.p0 = nn.Parameter(torch.zeros(5, 2))
    Reducer(model)
    message = f"gradient of parameter p0 is sparse on rank {world.rank}, but its module has not"
    with pytest.raises(RuntimeError, match=message):
        model(1.0).backward()


def test_undeclared_sparse_gradient_is_named(pair):
    pair(undeclared_sparse)


def broken_off(world, where, again, overlap, view):
    """An exception in user code, once, on all ranks alike: true where the next step is right."""
    model = Terms(1, 2, 3, 4)
    p = getattr(model, where)

    def fail(_):
        handle.remove()
        raise KeyError(where)

    handle = p.register_hook(fail)
    if again == "after accumulating":
        handle.remove()
    Reducer(model, bucket_cap_mb=8 * BYTES, overlap=overlap, gradient_as_bucket_view=view)
    if again == "after accumulating":
        handle = p.register_post_accumulate_grad_hook(fail)
    loss = model(own(world))
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    try:
        (loss if again == "same graph" else model(own(world))).backward()
    except RuntimeError:
        return False
    assert_grads(model, mean(world))
    return True


@pytest.mark.parametrize("where", ["p3", "p2", "p1", "p0"])
@pytest.mark.parametrize("again", ["new graph", "same graph", "after accumulating"])
@each_overlap
@each_view
def test_backward_broken_off_is_followed_by_a_right_one_or_an_error(
    pair, where, again, overlap, view
):
    one, other = pair(broken_off, where, again, overlap, view)
    assert one == other
    if where == "p3" and again != "after accumulating":
        assert one, "nothing had been counted in yet"


def accumulated_and_broken_off(world, view):
    """What was accumulated under no_sync() is for the next Reducer to average."""
    model = Terms(1, 2)
    reducer = Reducer(model, overlap=False, gradient_as_bucket_view=view)
    with reducer.no_sync():
        model(own(world)).backward()

    def fail(_):
        raise KeyError

    handle = model.p0.register_hook(fail)
    with pytest.raises(KeyError):
        model(own(world)).backward()
    assert [p.grad.tolist() for p in model.parameters()] == [[own(world)], [4 * own(world)] * 2]
    handle.remove()
    reducer.remove()
    Reducer(model, gradient_as_bucket_view=view)
    model(own(world)).backward()
    assert [p.grad.tolist() for p in model.parameters()] == [
        [2 * mean(world)],
        [6 * mean(world)] * 2,
    ]


@each_view
def test_a_pass_that_is_broken_off_takes_no_gradient_away(pair, view):
    pair(accumulated_and_broken_off, view)


class LastRegisteredFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.first(x).relu())


def laid_out_anew_where_needed(world):
    """Buckets that would be the same stay, and nobody has to move gradients and parameters."""
    usual = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for model, stays in ((usual, True), (LastRegisteredFirst(), False)):
        reducer = Reducer(model, bucket_cap_mb=0)
        before = reducer.flat_buckets
        model(torch.ones(1, 2)).sum().backward()
        assert (reducer.flat_buckets == before) == stays


def test_buckets_that_would_be_the_same_stay(ranks):
    ranks("gloo", 2)(laid_out_anew_where_needed)
