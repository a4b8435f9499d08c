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


def test_walk_reaches_exactly_what_backward_would():
    a, b, c, d = (torch.ones(2, requires_grad=True) for _ in range(4))
    out = (a * b).sum() + (c.detach() * torch.ones(2)).sum() + a.tanh().sum()
    assert {id(t) for t in reached([out, d])} == {id(a), id(b), id(d)}
    many = a
    for _ in range(200):  # 2^200 paths
        many = many + many
    assert reached([many.sum()]) == [a]
    # Through checkpoints that keep the graph, and not through others.
    kept, hidden = (checkpoint(a.mul, b, use_reentrant=reentrant) for reentrant in (False, True))
    assert {id(t) for t in reached([kept])} == {id(a), id(b)}
    assert reached([hidden]) is None


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


@on("gloo-2")
def test_buckets_without_a_gradient_need_not_be_sent(world):
    """And the buckets keep their layout."""
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=0, find_unused_parameters=True, skip_unused=True)
    for average, use in enumerate(((1,), (0, 2), (3,))):
        model.zero_grad()
        with recorded("all_reduce") as sent, recorded("broadcast") as orders:
            model(own(world), use).backward()
        needed = use if average else range(4)  # what ranks had before, each may have alone
        assert sent == [k + 1 for k in reversed(needed)] + [4]
        assert (orders, reducer.ready_order) == ([], None)
        assert grads_of(model) == [(k + 1) * mean(world) if k in use else None for k in range(4)]
    model.zero_grad()
    with reducer.no_sync():
        model(own(world), (0,)).backward()
    model(own(world), (1,)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world), None, None]


def out_of_a_structure(model, x):
    """p1 is reached from the outputs, but takes no part in the loss: known at backward's end."""
    return model(x, wrap=lambda a, b: Output((None, {"a": Pair(a, 3)}), [b])).loss[1]["a"].first


class Apart(Terms):
    """Each parameter's term apart, in a structure."""

    def forward(self, x, use=None, wrap=None):
        if wrap is None:
            return super().forward(x, use)
        return wrap(*(super(Apart, self).forward(x, (k,)) for k in range(2)))


def before_forward(model, x):
    outside = (model.p1 * x).sum()
    return model(x, (0,)) + outside


def after_forward(model, x):
    return model(x, (0,)) + (model.p1 * x).sum()


@pytest.mark.parametrize(
    ("loss", "p1"), [(out_of_a_structure, None), (before_forward, 1), (after_forward, 1)]
)
@on("gloo-2")
def test_what_outputs_do_not_show(world, loss, p1):
    """A loss that takes less than them, or p1 besides, to which backward comes last or first."""
    model = Apart(1, 2)
    Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        loss(model, own(world)).backward()
        assert grads_of(model) == [mean(world), p1 and mean(world)]


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


@each_kind
@on("gloo-2")
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
@on("gloo-2")
def test_transforms_of_torch_func_are_local(world, kind):
    """Before the first average and after it."""
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
            torch.func.vmap(torch.func.grad(of_parameters))(several)
            torch.func.jacfwd(model)(x)
            value, back = torch.func.vjp(model, x)
            back(torch.ones_like(value))
        model.zero_grad()
        plain.zero_grad()
        torch.vmap(model)(x).sum().backward()
        plain(x).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad, q.grad / world.world_size)


@on("gloo-2")
def test_a_removed_reducer_ignores_graphs_that_are_alive(world):
    model = Terms(1, 2)
    options = {"bucket_cap_mb": 0, "find_unused_parameters": True}
    first = Reducer(model, **options)
    output = model(own(world))
    first.remove()
    second = Reducer(model, **options)
    with recorded("all_reduce") as sent:
        output.backward()
    assert sent == [2, 1, 2]  # p1, p0, and who has used what
    assert grads_of(model) == [mean(world), 2 * mean(world)]
    second.remove()
