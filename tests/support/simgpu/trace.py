"""Reads the log of a simulated GPU: races, memory used again too early, waits."""

from collections import defaultdict
from typing import NamedTuple

from tests.support.simgpu import device
from tests.support.simgpu.device import COMMUNICATORS, GUARD, OPERATIONS, Operation, Span

# As in guard.cpp.
RECORD, WAIT, HOST_WAITS_FOR_EVENT, HOST_WAITS_FOR_STREAM, OPERATION, FREE, KEEP, MADE = range(8)
Clock = dict[int, int]  # for each stream, the number of its operations that are over


class Access(NamedTuple):
    span: Span
    stream: int
    time: int  # the number of the operation in its stream
    operation: Operation
    writes: bool


def faults() -> list[str]:  # noqa: C901
    """Pairs of operations on the same bytes, one of them a write, that no event orders.

    Memory that is freed may be written at once by the stream that it was made on.
    """
    clocks: dict[int, Clock] = defaultdict(lambda: defaultdict(int))
    at_event: dict[int, Clock] = {}
    host: Clock = defaultdict(int)
    accesses: dict[int, list[Access]] = defaultdict(list)  # by page, so that few are compared
    kept: set[tuple[int, int]] = set()  # (address, stream), by record_stream
    freed: dict[int, list[Access]] = defaultdict(list)  # by the stream that may write there
    found: dict[str, None] = {}
    for kind, what, stream in GUARD.entries():
        if kind == RECORD:
            _join(clocks[stream], host)
            at_event[what] = dict(clocks[stream])
        elif kind == WAIT:
            _join(clocks[stream], at_event.get(what, {}))
        elif kind == HOST_WAITS_FOR_EVENT:
            _join(host, at_event.get(what, {}))
        elif kind == HOST_WAITS_FOR_STREAM:
            for one in list(clocks) if stream == -1 else [stream]:
                _join(host, clocks[one])
        elif kind == MADE:
            # Tensors of the host may have been there before, also larger ones.
            made = Span(what, what + max(stream, 1))
            for page in _pages(made):
                accesses[page] = [a for a in accesses[page] if not _overlap(a.span, made)]
        elif kind == KEEP:
            kept.add((what, stream))
        elif kind == FREE:
            uses = [use for use in accesses[what // _PAGE] if use.span.begin == what]
            # The first to use it here is the stream that it was made on.
            others = [use for use in uses if use.stream != uses[0].stream]
            # The allocator waits for all that streams with record_stream have been given by now.
            waits = [clocks[kept_for] for address, kept_for in kept if address == what]
            unsafe = [u for u in others if all(clock[u.stream] < u.time for clock in waits)]
            if unsafe:
                freed[uses[0].stream] += unsafe
        elif kind == OPERATION:
            operation, clock = OPERATIONS[what], clocks[stream]
            _join(clock, host)
            clock[stream] += 1
            mine = [Access(s, stream, clock[stream], operation, False) for s in operation.reads]
            mine += [Access(s, stream, clock[stream], operation, True) for s in operation.writes]
            for use in freed.pop(stream, []):
                if clock[use.stream] < use.time:
                    found[f"{_text(use)}, whose memory is freed: {_text(mine[0])}"] = None
            for access in mine:
                for page in _pages(access.span):
                    for other in accesses[page]:
                        if _conflict(access, other) and clock[other.stream] < other.time:
                            found[f"{_text(other)}, then {_text(access)}"] = None
            for access in mine:
                for page in _pages(access.span):
                    accesses[page].append(access)
    return list(found)


_PAGE = 2**16


def _pages(span: Span) -> range:
    return range(span.begin // _PAGE, (span.end - 1) // _PAGE + 1)


def _overlap(one: Span, other: Span) -> bool:
    return one.begin < other.end and other.begin < one.end


def _conflict(one: Access, other: Access) -> bool:
    different = one.stream != other.stream and (one.writes or other.writes)
    return different and _overlap(one.span, other.span)


def _text(access: Access) -> str:
    verb = "write" if access.writes else "read"
    return f"{verb} by {access.operation.name} at {access.operation.place}"


def _join(into: Clock, other: Clock) -> None:
    for stream, time in list(other.items()):
        into[stream] = max(into[stream], time)


def stalls(begin: int) -> int:
    """From `begin` on, how often what computes waits for a collective before the last launch."""
    entries = GUARD.entries()[begin:]
    operations = [(k, what, s) for k, (kind, what, s) in enumerate(entries) if kind == OPERATION]
    last = max((k for k, _, stream in operations if _is_communicator(stream)), default=0)
    computing = {stream for _, what, stream in operations if OPERATIONS[what].place == "program"}
    theirs = {what for kind, what, s in entries if kind == RECORD and _is_communicator(s)}
    waits = [what for kind, what, s in entries[:last] if kind == WAIT and s in computing]
    return sum(what in theirs for what in waits)


def _is_communicator(stream: int) -> bool:
    return stream % 1000000 >= COMMUNICATORS


def host_waits(begin: int = 0) -> list[str]:
    """What the host has waited for, and where in the library."""
    return [f"{what} at {place}" for what, place in device.HOST_WAITS[begin:]]


# Where the library waits, once or where its documents say so.
EXPECTED_WAITS = {
    "tolist at core/reducer.py": "the order of buckets, in the first average",
    "optim/flat_params.py": "a state that was loaded",
    "optim/unflattened.py": "the same",
    "torch_ddp/join.py": "a rank without data, in torch's Join",
    "options/sparse.py": "the numbers of rows",
    "options/unused.py": "a rank with unused parameters",
    "common/group.py": "ranks that compare their modules",
    "options/finite.py": "check_finite",
    "options/local_steps.py": "a step on gradients that were not averaged",
    "aten::_local_scalar_dense at sync/sync_batch_norm.py": "nothing learns below a layer, or a "
    "batch has one value a channel",
    "sync/check_sync.py": "check_every, and once in the first average",
    "sync/checksums.py": "the same",
    "watch/stragglers.py": "a report of stragglers",
}


def unexpected_waits() -> list[str]:
    """What the host has waited for in the library, beyond EXPECTED_WAITS."""
    waits = zip(host_waits(), device.HOST_WAITS, strict=True)
    return [
        wait
        for wait, (_, place) in waits
        if place != "program"
        and EXPECTED_WAITS.keys().isdisjoint({wait.rpartition(":")[0], place.partition(":")[0]})
    ]
