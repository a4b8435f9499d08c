"""Parameters that take no part: what the graph reaches, and what ranks agree on."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import Reducer
from ddp_from_scratch.options.unused import reached
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, grads_of, mean, own, recorded

each_kind = pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph"])


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


@on("gloo-2")
def test_buckets_without_a_gradient_need_not_be_sent(world):
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


@pytest.mark.parametrize("views", [False, True])
@on("gloo-2")
def test_a_gradient_that_no_rank_uses_stays_from_pass_to_pass(world, views):
    model = Terms(1, 2)
    Reducer(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    model.p1.grad = torch.full_like(model.p1, own(world))
    for _ in range(3):
        model.p0.grad = None
        model(own(world), (0,)).backward()
        assert grads_of(model) == [mean(world), own(world)]


@pytest.mark.parametrize("order", [1, -1], ids=["before forward", "after forward"])
@on("gloo-2")
def test_what_outputs_do_not_show(world, order):
    """A parameter that is also used outside of the module."""
    model, x = Terms(1, 2), own(world)
    Reducer(model, bucket_cap_mb=0, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        terms = [lambda: (model.p1 * x).sum(), lambda: model(x, (0,))]
        sum(term() for term in terms[::order]).backward()
        assert grads_of(model) == [mean(world), mean(world)]


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


@on("gloo-2")
def test_a_removed_reducer_ignores_graphs_that_are_alive(world):
    model = Terms(1, 2)
    options = {"bucket_cap_mb": 0, "find_unused_parameters": True}
    first = Reducer(model, **options)
    output = model(own(world))
    first.remove()
    Reducer(model, **options)
    with recorded("all_reduce") as sent:
        output.backward()
    assert sent == [2, 1, 2]  # p1, p0, and who has used what
    assert grads_of(model) == [mean(world), 2 * mean(world)]


@on("gloo-2")
def test_ranks_agree_once(world):
    model = Terms(1, 2, 3, 4)
    reducer = Reducer(model, bucket_cap_mb=0, static_graph=True)
    expected = ([4, 3, 2, 1, 4], [1, 3, 4, 2], [1, 3, 4, 2])
    for sizes in expected:
        model.zero_grad()
        with recorded("all_reduce") as sent, recorded("broadcast") as orders:
            model(own(world), (2, 0)).backward()
        assert sent == sizes
        assert orders == ([4] if sizes is expected[0] else [])
        assert reducer.buckets == (("p0",), ("p2",), ("p3",), ("p1",))
        assert grads_of(model) == [mean(world), None, 3 * mean(world), None]


MISSING, EXTRA = "p1 0 instead of 1", "p2 1 instead of 0"


@pytest.mark.parametrize(
    ("uses", "told"),
    [
        ([(0,)], [f"on rank {{rank}} differs from the first .*: {MISSING}"]),
        # Every rank comes to all buckets before it raises, so that none waits for another.
        ([(0,), (0, 1, 2)], [MISSING, EXTRA]),
    ],
    ids=["same on all ranks", "different on each rank"],
)
@on("gloo-2")
def test_a_gradient_that_does_not_come_is_named(world, uses, told):
    """What came is averaged all the same, so ranks stay together."""
    model = Terms(1, 2, 3)
    Reducer(model, static_graph=True, bucket_cap_mb=12 * BYTES)
    for _ in range(2):
        model.zero_grad()
        model(own(world), (0, 1)).backward()
    loss = model(own(world), uses[world.rank % len(uses)])
    with pytest.raises(RuntimeError, match=told[world.rank % len(told)].format(rank=world.rank)):
        loss.backward()
    model.zero_grad()
    model(own(world), (0, 1)).backward()
    assert grads_of(model) == [mean(world), 2 * mean(world), None]


@on("gloo-2")
def test_a_graph_may_be_declared_static_later(world):
    model = Terms(1, 2, 3)
    reducer = Reducer(model)
    model(own(world)).backward()
    reducer.set_static_graph()
    for _ in range(3):
        reducer.set_static_graph()
        model.zero_grad()
        model(own(world), (0, 2)).backward()
        assert grads_of(model) == [mean(world), None, 3 * mean(world)]
    with pytest.raises(RuntimeError, match="p1 1 instead of 0, p2 0 instead of 1"):
        model(own(world), (0, 1)).backward()
