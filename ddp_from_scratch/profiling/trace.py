"""A record as a trace in Chrome's format, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator
from typing import Any

from ddp_from_scratch.profiling.record import BucketTimes, RankTimes, Record, Span, StepTimes

_MAIN, _FIRST_BUCKET = 0, 1


def as_json(record: Record) -> Iterator[str]:
    """Returns the parts of the trace: a process for each rank, a row for each bucket."""
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    for number, event in enumerate(_events(record)):
        yield ",\n" * (number > 0) + json.dumps(event)
    yield "]}"


def _events(record: Record) -> Iterator[dict[str, Any]]:
    rows = max(len(step.layout) for step in record.steps)
    for rank in record.steps[0].ranks:
        yield _name("process_name", rank.rank, _MAIN, f"rank {rank.rank}")
        yield _name("thread_name", rank.rank, _MAIN, "compute")
        for index in range(rows):
            row = _FIRST_BUCKET + index
            yield _name("thread_name", rank.rank, row, f"bucket {index}")
    begin = 0.0
    for step in record.steps:
        for rank in step.ranks:
            yield from _of_rank(record, step, rank, begin)
        # Steps one behind the other, with a gap.
        begin += step.length * 1.05


def _of_rank(
    record: Record, step: StepTimes, rank: RankTimes, begin: float
) -> list[dict[str, Any]]:
    def event(name: str, span: Span, row: int, **arguments: Any) -> dict[str, Any]:
        return {
            "name": name,
            "ph": "X",
            "pid": rank.rank,
            "tid": row,
            # Microseconds, to the nanosecond.
            "ts": round((begin + span[0]) * 1e3, 3),
            "dur": round((span[1] - span[0]) * 1e3, 3),
            "args": {"step": step.iteration, **arguments},
        }

    events = [event("forward", span, _MAIN) for span in rank.forward]
    events += [event("backward", span, _MAIN) for span in rank.backward]
    if rank.optimizer is not None:
        events.append(event("optimizer", rank.optimizer, _MAIN))
    for name, at in rank.arrived:
        moment = event(f"gradient of {name}", (at, at), _MAIN)
        events.append(moment | {"ph": "i", "s": "t"})
    for bucket in rank.buckets:
        row, what = _FIRST_BUCKET + bucket.index, _arguments(record, step, bucket)
        events += [
            event(f"pack bucket {bucket.index}", bucket.pack, _MAIN),
            event(f"wait for bucket {bucket.index}", bucket.wait, _MAIN),
            event(f"unpack bucket {bucket.index}", bucket.unpack, _MAIN),
            event("moves", (bucket.moving, bucket.sent[1]), row, **what),
        ]
        if bucket.last != rank.rank:
            waits = bucket.sent[0], bucket.met
            events.append(event(f"waits for rank {bucket.last}", waits, row, **what))
    return events


def _arguments(record: Record, step: StepTimes, bucket: BucketTimes) -> dict[str, Any]:
    return {
        "bytes": record.bucket_nbytes(step, bucket.index),
        "parameters": list(step.layout[bucket.index]),
    }


def _name(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
