"""A graph learnt in the first step. Averages are in tests/core/test_table.py."""

import pytest

from ddp_from_scratch import Reducer
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, grads_of, mean, own, recorded


@on("gloo-2")
def test_ranks_agree_once(world):
    """Who used what is agreed on once; the buckets are rebuilt once, the unused last."""
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
        ([(0,)], [f"on rank {{rank}} gave other .*: {MISSING}"]),
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
    """It may differ from those before; declared again, the first static pass stays what counts."""
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
