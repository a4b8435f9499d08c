"""Ranks with different numbers of batches. More: tests/core/test_table.py."""

import pytest
import torch

from ddp_from_scratch import Reducer, comm_hooks, join
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms


@pytest.mark.parametrize("by_initial", [True, False], ids=["initial", "effective"])
@on("gloo-3")
def test_ranks_without_data_take_part_with_nothing(world, by_initial):
    """Rank r has 2 r + 1 batches, rank 0 fewest; gradients of 1 for p0, 2 for p1."""
    model = Terms(1, 2, 3)
    reducer = Reducer(model, bucket_cap_mb=8 * BYTES, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with join(reducer, divide_by_initial_world_size=by_initial):
        for _ in range(2 * world.rank + 1):
            optimizer.zero_grad()
            model(1.0).backward()
            seen.append(model.p0.grad.item())
            optimizer.step()
    expected = [1, 2 / 3, 2 / 3, 1 / 3, 1 / 3] if by_initial else [1] * 5
    assert seen == pytest.approx(expected[: len(seen)])
    for k, p in enumerate(model.parameters()):  # the last rank's, on all
        assert p.tolist() == pytest.approx([-(k + 1) * sum(expected)] * (k + 1))


@on("gloo-2")
def test_with_no_sync_and_compression(world):
    """Batches 0 and 1 under no_sync(), 2 averages them; rank 0 ends after 3, rank 1 after 6."""
    model = Terms(1)
    reducer = Reducer(model)
    reducer.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    with join(reducer):
        for step in range(3 * (world.rank + 1)):
            if step % 3 < 2:
                with reducer.no_sync():
                    model(1.0).backward()
            else:
                model(1.0).backward()
                assert model.p0.grad.tolist() == [3.0 if step < 3 else 1.5]
                model.zero_grad()
