"""Parameters that take no part: what the graph reaches."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.autograd.graph_walk import find_tensors, reached
from tests.support.terms import Terms, each_view, grads_of, mean, own, recorded

Pair = namedtuple("Pair", "first second")


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
    frozen = torch.ones(2)
    out = (a * b).sum() + (c.detach() * frozen).sum() + a.tanh().sum()
    found = reached([out, d])
    assert {id(t) for t in found} == {id(a), id(b), id(d)}
    out.backward()
    assert c.grad is None


def test_walk_visits_a_shared_graph_once():
    x = leaf()
    out = x
    for _ in range(200):  # 2^200 paths
        out = out + out
    assert reached([out.sum()]) == [x]


def test_walk_sees_through_checkpoints_that_keep_the_graph_and_not_through_others():
    a = leaf()
    x = torch.ones(2, requires_grad=True)
    assert {id(t) for t in reached([checkpoint(a.mul, x, use_reentrant=False)])} == {id(a), id(x)}
    assert reached([checkpoint(a.mul, x, use_reentrant=True)]) is None


class Structured(nn.Module):
    """Returns tensors in a structure; the loss takes one of them."""

    def __init__(self, wrap):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.used(x), self.unused(x))


WRAPS = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"loss": a, "more": [b]},
    "named tuple": Pair,
    "dataclass": Output,
    "nested": lambda a, b: Output((None, {"a": Pair(a, 3)}), [b]),
}


def output_outside_of_the_loss(world, name):
    """Reached from the outputs, but not in the loss: known at the end of backward."""
    model = Structured(WRAPS[name])
    Reducer(model, find_unused_parameters=True, bucket_cap_mb=0)
    for _ in range(2):
        model.zero_grad()
        out = next(iter(find_tensors(model(torch.full((1, 2), own(world))))))
        out.sum().backward()
        assert model.used.weight.grad.tolist() == [[mean(world)] * 2]
        assert model.unused.weight.grad is None


@pytest.mark.parametrize("name", WRAPS)
def test_outputs_that_take_no_part_in_the_loss(ranks, name):
    ranks("gloo", 2)(output_outside_of_the_loss, name)


def several_forwards(world, view):
    model = Terms(1, 2, 3, 4)
    Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=view, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        one, two = model(own(world), (0,)), model(own(world), (0, 3))
        (one + two).backward()
        assert grads_of(model) == [2 * mean(world), None, None, 4 * mean(world)]
        model.zero_grad()
        one, two = model(own(world), (0, 1)), model(own(world), (0, 3))
        one.backward()
        assert grads_of(model) == [mean(world), 2 * mean(world), None, None]
        two.backward()
        assert grads_of(model) == [2 * mean(world), 2 * mean(world), None, 4 * mean(world)]
        model.zero_grad()
        loss = model(own(world), (1,))
        loss.backward(retain_graph=True)
        loss.backward()
        assert grads_of(model) == [None, 4 * mean(world), None, None]


@each_view
def test_several_forwards_and_retained_graphs(pair, view):
    pair(several_forwards, view)


def complex_parameters(world, view):
    model = Terms(1, 2, dtypes=(torch.complex64, torch.complex128))
    Reducer(model, gradient_as_bucket_view=view, find_unused_parameters=True)
    for use in ((0, 1), (0,)):
        model.zero_grad()
        model(own(world), use).backward()
        for k, p in enumerate(model.parameters()):
            if k in use:
                assert torch.equal(p.grad, torch.full_like(p, (k + 1) * mean(world)))


@each_view
def test_complex_gradients(pair, view):
    pair(complex_parameters, view)


def undefined(world, unused):
    """Backward comes by and brings nothing."""
    model = Terms(1, 2)
    Reducer(model, find_unused_parameters=unused)
    loss = torch._C._functions.UndefinedGrad()(model(own(world)))
    loss.backward()
    assert grads_of(model) == [None, None]
    model(own(world)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world)]


@pytest.mark.parametrize("unused", [False, True])
def test_undefined_gradients(pair, unused):
    pair(undefined, unused)


def outside_of_forward(world, computed_before):
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


@pytest.mark.parametrize("computed_before", [True, False])
def test_a_parameter_used_outside_of_forward(pair, computed_before):
    pair(outside_of_forward, computed_before)


def grad_of_grad(world, kind):
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


@pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph"])
def test_autograd_grad_is_local(pair, kind):
    pair(grad_of_grad, kind)


def inside_torch_func(world, kind):
    """Transforms of torch.func, before the first average and after it, are this rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    reducer = Reducer(model, **{kind: True})
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    several = {name: torch.stack([p, p]) for name, p in parameters.items()}
    x = torch.full((2, 3), float(world.rank))

    def of_parameters(values):
        return functional_call(model, values, (x,)).sum()

    for _ in range(3):
        if world.rank == 0:
            torch.func.grad(lambda x: model(x).sum())(x)
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
    reducer.remove()


@pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph"])
def test_transforms_of_torch_func_are_local(pair, kind):
    pair(inside_torch_func, kind)


def accumulated_under_another_reducer(world, kind, dropped):
    """Rank 0 has accumulated a gradient that no pass of the second Reducer brings."""
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    for layer in model:
        nn.init.ones_(layer.weight)
    x = torch.ones(1, 2)
    first = Reducer(model, find_unused_parameters=True)
    with first.no_sync():
        (model[0](x) * (world.rank == 0) + model[1](x)).sum().backward()
    first.remove()
    if world.rank:
        model[0].weight.grad = None
    second = Reducer(model, **{kind: True})
    if dropped:
        model.zero_grad()
    for average in range(2):
        model[1](x).sum().backward()
        if dropped:
            assert model[0].weight.grad is None
        else:
            assert model[0].weight.grad.tolist() == [[1 / world.world_size] * 2] * 2
        local = 1 if dropped else 2
        assert model[1].weight.grad.tolist() == [[local + average] * 2] * 2
    second.remove()


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph"])
def test_what_another_reducer_has_accumulated_is_averaged_too(pair, kind, dropped):
    pair(accumulated_under_another_reducer, kind, dropped)


def removed_before_backward(world):
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


def test_a_removed_reducer_ignores_graphs_that_are_alive(pair):
    pair(removed_before_backward)
