"""torch.profiler sees each bucket, by name, in every phase."""

import math

import torch
from torch.profiler import ProfilerActivity, profile

from ddp_from_scratch import Reducer
from tests.support.terms import BYTES, Terms, own

PHASES = ("pack, launch", "wait")


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
    buckets = ("ddp.bucket 0 (p2, p1)", "ddp.bucket 1 (p0)")
    expected = [f"{bucket}: {phase}" for bucket in buckets for phase in PHASES]
    assert sorted(event.name for event in found) == sorted(2 * expected)
    assert not any(event.is_async for event in found)
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
    assert {f"ddp.bucket 0 (p0): {phase}" for phase in PHASES} <= names


def test_torchs_old_profiler_sees_them_too(ranks):
    ranks("gloo", 2)(old_profiler)
