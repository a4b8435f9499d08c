"""torch.profiler sees each bucket, by name, in every phase."""

import math

import torch
from torch.profiler import ProfilerActivity, profile

from ddp_from_scratch import Reducer
from tests.support.terms import BYTES, Terms, own

PHASES = ("pack, launch", "on its way", "wait", "unpack")


def ranges(profiler):
    return [event for event in profiler.events() if event.name.startswith("ddp.bucket")]


def profiled(world):
    model = Terms(2, 2, 2)
    reducer = Reducer(model, bucket_cap_mb=16 * BYTES)
    observers = list(reducer._observers)
    model(own(world)).backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            model(own(world)).backward()
    count = len(reducer.buckets)
    assert count == 2
    found = ranges(profiler)
    expected = [f"ddp.bucket {index}: {phase}" for index in range(count) for phase in PHASES]
    assert sorted(event.name for event in found) == sorted(2 * expected)
    # "on its way" may end in another thread, and is asynchronous then.
    assert not any(e.is_async for e in found if not e.name.endswith("on its way"))
    model(own(world)).backward()
    assert reducer._observers == observers  # off again
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(own(world)).backward()
    assert len(ranges(profiler)) == len(expected)


def test_every_phase_of_every_bucket_is_a_range(pair):
    pair(profiled)


def old_profiler(world):
    model = Terms(2)
    Reducer(model, bucket_cap_mb=math.inf)
    with torch.autograd.profiler.profile() as profiler:
        model(own(world)).backward()
    names = {event.name for event in profiler.function_events}
    assert {f"ddp.bucket 0: {phase}" for phase in PHASES} <= names


def test_torchs_old_profiler_sees_them_too(ranks):
    ranks("gloo", 2)(old_profiler)
