"""Ranks that count by their number of samples: exactly the gradient of the whole batch."""

import re

import pytest

from ddp_from_scratch import Reducer
from tests.support.on_ranks import on
from tests.support.terms import Terms

WRONG = (-1, float("nan"), float("inf"), 10**400, "many", None)


@on("gloo-3")
def test_refusing_what_is_no_weight(world):
    """Where one rank's is wrong all raise: the others would wait for gradients that do not come."""
    model = Terms(1)
    for amount in WRONG:
        reducer = Reducer(model)
        loss = model(1.0)
        if world.rank == 1:
            got = re.escape(f"a weight must be 0 or more, and finite, got {amount};")
            with pytest.raises(ValueError, match=got):
                reducer.weight(amount)
        else:
            reducer.weight(1)
            with pytest.raises(ValueError, match="another rank's weight is negative or not finite"):
                loss.backward()
        reducer.remove()
    reducer = Reducer(model)
    reducer.weight(0)
    loss = model(1.0)
    with pytest.raises(ValueError, match="all ranks are 0"):
        loss.backward()
