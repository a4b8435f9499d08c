"""Parameters that take no part: what the graph reaches, and what ranks agree on.

Averages are in tests/reducer/test_table.py.
"""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.autograd.graph_walk import find_tensors, reached
from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup
from tests.support.on_ranks import on
from tests.support.terms import Terms, grads_of, mean, own, recorded

Pair = namedtuple("Pair", "first second")
each_kind = pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph"])


@dataclass
class Output:
    loss: Any
    logits: Any = None


def test_tensors_are_found_in_everything_that_modules_return():
    a, b, c = (torch.zeros(1) for _ in range(3))
    for value in (
        (a, b, c),
        [a, (b, [c])],
        {"a": a, "rest": {"b": b, "c": c}},
        OrderedDict(a=a, b=Pair(b, c)),
        Output(a, Output(b, {"c": c, "no": None, "text": "abc", "number": 3})),
    ):
        assert [id(t) for t in find_tensors(value)] == [id(a), id(b), id(c)]
    for value in (None, 3, "abc", object(), Output):
        assert list(find_tensors(value)) == []


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_walk_reaches_exactly_what_backward_would():
    a, b, c, d = leaf(), leaf(), leaf(), leaf()
    out = (a * b).sum() + (c.detach() * torch.ones(2)).sum() + a.tanh().sum()
    assert {id(t) for t in reached([out, d])} == {id(a), id(b), id(d)}
    many = a
    for _ in range(200):  # 2^200 paths
        many = many + many
    assert reached([many.sum()]) == [a]


def test_walk_sees_through_checkpoints_that_keep_the_graph_and_not_through_others():
    a, x = leaf(), leaf()
    assert {id(t) for t in reached([checkpoint(a.mul, x, use_reentrant=False)])} == {id(a), id(x)}
    assert reached([checkpoint(a.mul, x, use_reentrant=True)]) is None


@pytest.mark.parametrize(("kind", "count"), [("find_unused_parameters", 4), ("static_graph", 3)])
@on("gloo-2")
def test_ranks_agree_in_shared_memory_too(world, kind, count):
    """Whether each all-reduce of two averages is one in shared memory."""
    model = Terms(1, 2, 3, 4)
    Reducer(model, **{kind: True})
    sent = []
    original = dist.all_reduce

    def all_reduce(tensor, **options):
        sent.append(isinstance(options["group"], SharedMemoryGroup))
        return original(tensor, **options)

    with patch.object(dist, "all_reduce", all_reduce):
        for _ in range(2):
            model(own(world), (0, 2)).backward()
    assert sent == [True] * count


@pytest.mark.parametrize("view", [False, True])
@on("crew")
def test_what_some_rank_uses_gets_the_average_on_all(world, view):
    """Exact, and older gradients of what nobody uses stay; the buckets keep their layout."""
    model = Terms(1, 2, 3, 4)
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
    reducer = Reducer(model, bucket_cap_mb=0, **options)
    model.p3.grad = torch.full((4,), 7.0 + world.rank)
    rest = mean(world) - 1  # of all ranks but 0
    for _ in range(3):
        model.p0.grad = model.p1.grad = model.p2.grad = None
        with recorded("all_reduce") as sent, recorded("broadcast") as orders:
            model(own(world), (0, 1) if world.rank == 0 else (1, 2)).backward()
        assert sent == [4, 3, 2, 1, 4]  # and who used what
        assert orders == []
        expected = [1.0, 2 * mean(world), 3 * rest, 7.0 + world.rank]
        assert grads_of(model) == pytest.approx(expected, rel=1e-6)
    assert reducer.ready_order is None


@on("pair")
def test_buckets_without_a_gradient_need_not_be_sent(world):
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


class Structured(nn.Module):
    """Returns tensors in a structure; the loss takes one of them."""

    def __init__(self, wrap):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.used(x), self.unused(x))


WRAPS = {
    "dict": lambda a, b: {"loss": a, "more": [b]},
    "named tuple": Pair,
    "nested": lambda a, b: Output((None, {"a": Pair(a, 3)}), [b]),
}


@pytest.mark.parametrize("name", WRAPS)
@on("gloo-2")
def test_outputs_that_take_no_part_in_the_loss(world, name):
    """Reached from the outputs, but not in the loss: known at the end of backward."""
    model = Structured(WRAPS[name])
    Reducer(model, find_unused_parameters=True, bucket_cap_mb=0)
    for _ in range(2):
        model.zero_grad()
        out = next(iter(find_tensors(model(torch.full((1, 2), own(world))))))
        out.sum().backward()
        assert model.used.weight.grad.tolist() == [[mean(world)] * 2]
        assert model.unused.weight.grad is None


@pytest.mark.parametrize("unused", [False, True])
@on("gloo-2")
def test_undefined_gradients(world, unused):
    """Backward comes by and brings nothing."""
    model = Terms(1, 2)
    Reducer(model, find_unused_parameters=unused)
    torch._C._functions.UndefinedGrad()(model(own(world))).backward()
    assert grads_of(model) == [None, None]
    model(own(world)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world)]


@pytest.mark.parametrize("computed_before", [True, False])
@on("pair")
def test_a_parameter_used_outside_of_forward(world, computed_before):
    """A parameter that the loss uses directly: backward comes to it last, or first."""
    model = Terms(1, 2)
    Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        if computed_before:
            outside = (model.p1 * own(world)).sum()
            loss = model(own(world), (0,)) + outside
        else:
            loss = model(own(world), (0,))
            loss = loss + (model.p1 * own(world)).sum()
        loss.backward()
        assert grads_of(model) == [mean(world), mean(world)]


@each_kind
@on("pair")
def test_autograd_grad_is_local(world, kind):
    """torch.autograd.grad accumulates nothing and sends nothing, even on one rank alone."""
    model = Terms(1, 2, 3)
    Reducer(model, bucket_cap_mb=0, **{kind: True})
    x = torch.tensor(own(world), requires_grad=True)
    for step in range(3):
        model.zero_grad()
        loss = model(x, (0, 2))
        if world.rank == 0 and step != 1:
            with recorded("all_reduce") as sent:
                torch.autograd.grad(loss, x, retain_graph=True)
                torch.autograd.grad(loss, [model.p0, model.p2], retain_graph=True)
            assert sent == []
        loss.backward()
        assert grads_of(model) == [mean(world), None, 3 * mean(world)]
    model.zero_grad()
    if kind == "find_unused_parameters":
        model(x).backward(inputs=[model.p1])
        assert grads_of(model) == [None, 2 * mean(world), None]


@each_kind
@on("pair")
def test_transforms_of_torch_func_are_local(world, kind):
    """Transforms of torch.func, before the first average and after it, are this rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    Reducer(model, **{kind: True})
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    several = {name: torch.stack([p, p]) for name, p in parameters.items()}
    x = torch.full((2, 3), float(world.rank))

    def of_parameters(values):
        return functional_call(model, values, (x,)).sum()

    for _ in range(3):
        if world.rank == 0:
            torch.func.grad(of_parameters)(parameters)
            torch.func.vmap(torch.func.grad(of_parameters))(several)
            torch.func.jacfwd(model)(x)
            value, back = torch.func.vjp(model, x)
            back(torch.ones_like(value))
        model.zero_grad()
        torch.vmap(model)(x).sum().backward()
        plain.zero_grad()
        plain(x).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad, q.grad / world.world_size)


@on("pair")
def test_a_removed_reducer_ignores_graphs_that_are_alive(world):
    """A graph of before knows the Reducer of before, which is to do nothing."""
    model = Terms(1, 2)
    first = Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
    output = model(own(world))
    first.remove()
    second = Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
    with recorded("all_reduce") as sent:
        output.backward()
    assert sent == [2, 1, 2]  # p1, p0, and who has used what
    assert grads_of(model) == [mean(world), 2 * mean(world)]
    second.remove()
