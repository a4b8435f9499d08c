"""torch.profiler sees each bucket, by name, in every phase."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ddp_from_scratch import Reducer
from tests.support.on_ranks import on
from tests.support.terms import BYTES, Terms, own

PHASES = ("pack", "launch", "wait", "unpack")


def ranges(profiler):
    return [event for event in profiler.events() if event.name.startswith("ddp.bucket")]


@on("gloo-2")
def test_every_phase_of_every_bucket_is_a_range(world):
    model = Terms(2, 2, 2)
    reducer = Reducer(model, bucket_cap_mb=16 * BYTES)
    model(own(world)).backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            model(own(world)).backward()
    count = len(reducer.buckets)
    assert count == 2
    found = ranges(profiler)
    buckets = ("ddp.bucket 0 (p2, p1)", "ddp.bucket 1 (p0)")
    expected = [f"{bucket}: {phase}" for bucket in buckets for phase in PHASES]
    assert sorted(event.name for event in found) == sorted(2 * expected)
    assert not any(event.is_async for event in found)
    model(own(world)).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(own(world)).backward()
    assert len(ranges(profiler)) == len(expected)


@pytest.mark.parametrize("where", ["launch", "wait"])
@on("gloo-1")
def test_a_range_ends_with_a_phase_that_raises(world, where):
    """The hook, or the average, raises at the end of backward: inside no range of autograd's."""
    model = Terms(2)
    reducer = Reducer(model, overlap=False)

    def hook(state, bucket):
        future = torch.futures.Future()
        if where == "launch":
            raise ZeroDivisionError
        future.set_exception(ZeroDivisionError())
        return future

    reducer.register_comm_hook(None, hook)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = model(own(world))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        torch.ones(1).cos_()
    assert [event.name.rpartition(": ")[2] for event in ranges(profiler)][-1] == where
    (later,) = [event for event in profiler.events() if event.name == "aten::cos_"]
    assert all(event.time_range.end <= later.time_range.start for event in ranges(profiler))
