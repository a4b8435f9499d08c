"""Parameters that take no part: what ranks agree on, step by step.

Rank r's input is n (r + 1), as in terms.py: the gradient of p_k is (k + 1) times it.
"""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_from_scratch import Reducer
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup
from tests.support.terms import BYTES, Chain, Terms, each_view, grads_of, mean, own, recorded


def assert_near(model: nn.Module, expected: list[float | None]) -> None:
    """To rounding: an average of averages divides by 3 more than once."""
    for value, correct in zip(grads_of(model), expected, strict=True):
        assert value == (None if correct is None else pytest.approx(correct, rel=1e-6))


def same_everywhere(world, view, cap, static):
    """p1 and p3 are never used, p1 has an older gradient."""
    model = Terms(1, 2, 3, 4)
    kind = {"static_graph": True} if static else {"find_unused_parameters": True}
    Reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=view, **kind)
    model.p1.grad = torch.full((2,), 7.0 + world.rank)
    for _ in range(3):
        model.p0.grad = model.p2.grad = None
        model(own(world), (0, 2)).backward()
        assert grads_of(model) == [mean(world), 7.0 + world.rank, 3 * mean(world), None]


@each_view
@pytest.mark.parametrize("cap", [0, 12 * BYTES, None])
@pytest.mark.parametrize("static", [False, True], ids=["found", "static"])
def test_grad_of_what_no_rank_uses_is_not_touched(crew, view, cap, static):
    crew(same_everywhere, view, cap, static)


def sent_by(world, static):
    """Whether each all-reduce of two averages is one in shared memory."""
    model = Terms(1, 2, 3, 4)
    Reducer(model, find_unused_parameters=not static, static_graph=static)
    sent = []
    original = dist.all_reduce
    with patch.object(
        dist,
        "all_reduce",
        lambda tensor, **options: (
            sent.append(isinstance(options["group"], SharedMemoryGroup)),
            original(tensor, **options),
        )[1],
    ):
        for _ in range(2):
            model(own(world), (0, 2)).backward()
    return sent


@pytest.mark.parametrize(("static", "count"), [(False, 4), (True, 3)], ids=["found", "static"])
def test_ranks_agree_in_shared_memory_too(ranks, static, count):
    assert ranks("gloo", 2)(sent_by, static) == [[True] * count] * 2


def differs_by_rank(world, view, cap):
    """Rank 0 uses p0 and p1, the others p1 and p2; p3 nobody."""
    n = world.world_size
    model = Terms(1, 2, 3, 4)
    Reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=view, find_unused_parameters=True)
    rest = sum(n * (r + 1) for r in range(1, n)) / n
    for step in (1, 2, 3):  # accumulated: averages of averages
        model(own(world), (0, 1) if world.rank == 0 else (1, 2)).backward()
        expected = [step * 1.0, step * 2 * mean(world), step * 3 * rest, None]
        assert_near(model, expected)
    for _ in range(2):
        model.zero_grad()
        model(own(world), (0, 1) if world.rank == 0 else (1, 2)).backward()
        assert_near(model, [1.0, 2 * mean(world), 3 * rest, None])


@each_view
@pytest.mark.parametrize("cap", [0, 12 * BYTES, None])
def test_what_some_rank_uses_gets_the_average_on_all(crew, view, cap):
    crew(differs_by_rank, view, cap)


def from_step_to_step(world, view):
    model = Terms(1, 2, 3)
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=view)
    assert reducer.buckets
    reducer.remove()
    reducer = Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
    for use in ((0,), (1, 2), (2,), (0, 1, 2), (1,)):
        model.zero_grad()
        with recorded("all_reduce") as sent:
            model(own(world), use).backward()
        assert sent == [3, 2, 1, 3]  # p2, p1, p0, and who used what
        assert grads_of(model) == [(k + 1) * mean(world) if k in use else None for k in range(3)]


@each_view
def test_other_parameters_in_each_step(crew, view):
    crew(from_step_to_step, view)


def early(world):
    """Seen when p0's gradient, the only one, has come: what is not reached is on its way."""
    model = Terms(1, 2, 3, 4)
    seen = []
    with recorded("all_reduce") as sent:
        model.p0.register_post_accumulate_grad_hook(lambda _: seen.append(list(sent)))
        Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
        for _ in range(2):
            sent.clear()
            model(own(world), (0,)).backward()
    return seen


def test_unreached_parameters_do_not_hold_their_buckets_back(ranks):
    assert ranks("gloo", 2)(early) == [[[4, 3, 2]] * 2] * 2


def accumulated(world, view):
    """p0 is used only under no_sync(), p2 only outside, p1 nowhere."""
    model = Terms(1, 2, 3)
    reducer = Reducer(
        model, bucket_cap_mb=0, gradient_as_bucket_view=view, find_unused_parameters=True
    )
    for set_to_none in (True, False):
        for _ in range(2):
            model.zero_grad(set_to_none)
            with reducer.no_sync():
                model(own(world), (0,)).backward()
            model(own(world), (2,)).backward()
            assert grads_of(model) == [mean(world), None, 3 * mean(world)]


@each_view
def test_used_under_no_sync_counts_as_used(pair, view):
    pair(accumulated, view)


def checkpointed(world, reentrant, static):
    model = Chain(1, 2, 3, 4)
    model.unused = nn.Parameter(torch.zeros(2))
    model.forward = lambda start, x: Chain.forward(Used(model), start, x, reentrant)
    kind = {"static_graph": True} if static else {"find_unused_parameters": True}
    Reducer(model, bucket_cap_mb=0, **kind)
    for _ in range(3):
        model.zero_grad()
        model(torch.zeros((), requires_grad=True), own(world)).backward()
        assert grads_of(model) == [(k + 1) * mean(world) for k in range(4)] + [None]


class Used:
    """A module's parameters, without the unused one."""

    def __init__(self, module):
        self.module = module

    def parameters(self):
        return [p for name, p in self.module.named_parameters() if name != "unused"]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("static", [False, True], ids=["found", "static"])
def test_activation_checkpointing(pair, reentrant, static):
    pair(checkpointed, reentrant, static)


def freeze(world, view):
    """Frozen on both ranks, then on one alone, then on none."""
    model = Terms(1, 2)
    Reducer(model, gradient_as_bucket_view=view, find_unused_parameters=True)
    for frozen, expected in (
        (False, [mean(world), 2 * mean(world)]),
        (True, [None, 2 * mean(world)]),
        (world.rank == 1, [1.0, 2 * mean(world)]),
        (False, [mean(world), 2 * mean(world)]),
    ):
        model.zero_grad()
        model.p0.requires_grad_(not frozen)
        model(own(world)).backward()
        assert grads_of(model) == expected


@each_view
def test_parameters_freeze_and_thaw(pair, view):
    pair(freeze, view)


def skipped(world):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=0, find_unused_parameters=True, skip_unused=True)
    for average, use in enumerate(((1,), (0, 2), (3,))):
        model.zero_grad()
        with recorded("all_reduce") as sent:
            model(own(world), use).backward()
        needed = use if average else range(4)  # what ranks had before, each may have alone
        assert sent == [k + 1 for k in reversed(needed)] + [4]
        assert grads_of(model) == [(k + 1) * mean(world) if k in use else None for k in range(4)]
    model.zero_grad()
    with reducer.no_sync():
        model(own(world), (0,)).backward()
    model(own(world), (1,)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world), None, None]


def test_buckets_without_a_gradient_need_not_be_sent(pair):
    pair(skipped)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.never = nn.Linear(4, 4)

    def forward(self, x, which):
        return self.shared(torch.tanh(self.branches[which](x)))


def beside_torch(world, view):
    """Another branch on each rank and in each step."""
    torch.manual_seed(0)
    ours = Branches()
    inner = copy.deepcopy(ours)
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
    Reducer(ours, bucket_cap_mb=1e-4, **options)
    theirs = DistributedDataParallel(inner, bucket_cap_mb=1e-4, **options)
    for step in range(6):
        x = torch.randn(3, 4)
        which = (step + (world.rank if step % 2 else 0)) % 3
        for model, called in ((ours, ours), (inner, theirs)):
            model.zero_grad()
            called(x, which).square().sum().backward()
        for p, q in zip(ours.parameters(), inner.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            # With three ranks the layout decides the order of the sums.
            tolerance = {"rtol": 0, "atol": 0 if world.world_size == 2 else 1e-6}
            torch.testing.assert_close(p.grad, q.grad, **tolerance)


@each_view
@pytest.mark.parametrize("world_size", [2, 3])
def test_as_torch(ranks, world_size, view):
    ranks("gloo", world_size)(beside_torch, view)
