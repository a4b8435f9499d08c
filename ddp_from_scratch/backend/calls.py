"""Reads which collectives a rank has called on its gloo groups, and finds ranks that disagree.

torch's gloo backend notes every collective in its flight recorder. Nothing here runs in a step: the
recorder is read only after a rank has waited for seconds (`call_watch.py`), or after the number of
calls has differed between ranks (`barrier.py`).

Every rank's main thread must call the same collectives in the same order. So at any two moments one
of two ranks is behind the other in every group. If each is ahead in another group, neither order
can be the other's:

                 gloo group   averages
    rank 0       5            11         <- in its fifth call, which rank 1 has not made
    rank 1       4            12         <- in its twelfth average, which rank 0 has not made
"""

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.operations import name_ranks
from ddp_from_scratch.common.frames import local_of, stack_of

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = dist.distributed_c10d.__file__
_FUTURES = torch.futures.__file__
_WRAPPER = "c10d_logger.py"  # torch's decorator around its collectives
# Messages may come in any order. The others are not collectives of one group.
_NOT_COLLECTIVE = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "destroy_process_group")
_MOST_CALLS = 50  # that a position lists of each group
MONITORED = "monitored_barrier"  # consists of messages, which the recorder does not note

AVERAGES = "averages of "  # and a gloo group's name: the calls of the node group beside it


@dataclass(frozen=True)
class Call:
    """A collective of a gloo group, as torch's recorder noted it."""

    order: int  # among all in the recorder since the process began, from 0
    group: str
    number: int  # among the group's collectives on this rank, from 1
    sequence: int  # the group's sequence number, which messages increase, too
    text: str  # `broadcast of 3 x Float`
    by_main_thread: bool


def recorded() -> list[Call]:
    """Returns the calls in torch's recorder, by default the last 2000. Takes up to a second."""
    found = torch._C._distributed_c10d._dump_fr_trace_json(True, False)
    main = str(threading.main_thread().ident)
    entries = json.loads(found).get("entries", [])
    calls = [_call(entry, main) for entry in entries if not entry.get("is_p2p")]
    # A group may have the name of an earlier one, whose numbers the new one repeats.
    latest: list[Call] = []
    lowest: dict[str, int] = {}
    for call in reversed(calls):
        if call.number < lowest.get(call.group, sys.maxsize):
            lowest[call.group] = call.number
            latest.append(call)
        else:
            lowest[call.group] = 0
    return latest[::-1]


def names_of(group: str, after: int, until: int) -> tuple[int, str] | None:
    """Counts the calls on a group between two sequence numbers; names the last.

    None if the recorder has forgotten some, or if another thread has made some: a comm hook's
    second collective is called by the main thread or by gloo's, whichever is faster.
    """
    calls = recorded()
    own = [call for call in calls if call.group == group]
    if calls and calls[0].order > 0 and (not own or own[0].sequence > after):
        return None
    between = [call for call in own if after < call.sequence <= until]
    if not all(call.by_main_thread for call in between):
        return None
    texts = [call.text for call in between]
    return len(texts), ", ".join(["..."] * (len(texts) > 3) + texts[-3:])


def _call(entry: Mapping[str, Any], main: str) -> Call:
    kind = entry["profiling_name"].partition(":")[2]
    # Other collectives may have sizes that differ between ranks.
    if kind in ("all_reduce", "broadcast") and entry["input_sizes"]:
        numel = torch.Size(entry["input_sizes"][0]).numel()
        dtype = entry["input_dtypes"][0]  # `Float`
        kind += f" of {numel} x {getattr(torch, dtype.lower(), dtype)}"
    by_main = str(entry.get("thread_id", main)) == main
    name, number = entry["process_group"][0], entry["collective_seq_id"]
    return Call(entry["record_id"], name, number, entry["op_id"], kind, by_main)


@dataclass(frozen=True)
class BlockingCall:
    """The collective in which this rank's main thread is, as seen from its stack."""

    ours: bool  # in a call of this package, so `function` and `group` are not known
    function: str = ""
    group: dist.ProcessGroup | None = None
    raises: bool = False  # an error that another thread sets is raised from this very call


def blocked() -> BlockingCall | None:
    """Returns the collective in which the main thread is; None if it may be computing."""
    stack = stack_of(threading.main_thread().ident)
    while stack and stack[0].f_code.co_filename == _FUTURES:
        del stack[0]
    if not stack:
        return None
    frame = stack[0]
    if frame.f_code.co_filename.startswith(_PACKAGE):
        return BlockingCall(ours=True)
    if frame.f_code.co_filename != _TORCH:
        return None
    outer, wrapped = frame, False
    for one in stack:
        wrapped = wrapped or one.f_code.co_filename.endswith(_WRAPPER)
        if one.f_code.co_filename == _TORCH:
            outer = one
        elif not one.f_code.co_filename.endswith((_WRAPPER, "typing_extensions.py")):
            break
    function, group = outer.f_code.co_name, local_of(outer, "group")
    if function.startswith("_") or function in _NOT_COLLECTIVE:
        return None
    group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    return BlockingCall(False, function, group, wrapped)


# A rank's position, and its comparison with others' ----------------------------------------------


@dataclass(frozen=True)
class Position:
    """A rank's progress in each of its groups.

    Attributes:
        waits_in: the group in whose collective the main thread is; "" if it may be computing.
        call: that collective.
        numbers: by group, how many collectives this rank has called.
        texts: by group, its last calls; "" for one of another thread.
    """

    waits_in: str
    call: str
    numbers: dict[str, int]
    texts: dict[str, list[str]]

    @classmethod
    def of(
        cls, block: BlockingCall | None, groups: list[str], averages: dict[str, int], now: str
    ) -> Self:
        """Reads the position. `averages` counts those by group; `now` is the one under way."""
        calls = recorded()
        numbers, texts = dict(averages), {name: [now] for name in averages}
        # A group without calls in a recorder that has forgotten some may have had calls.
        complete = not calls or calls[0].order == 0
        for group in groups:
            own = [call for call in calls if call.group == group]
            if own or complete:
                numbers[group] = own[-1].number if own else 0
                last = own[-_MOST_CALLS:]
                texts[group] = [call.text if call.by_main_thread else "" for call in last]
        if block is None or (block.ours and not now):
            return cls("", "", numbers, texts)
        if block.ours:
            return cls(next(iter(averages)), now, numbers, texts)
        name = str(block.group.group_name) if block.group is not None else ""
        latest = (texts.get(name) or [""])[-1]
        # torch notes what it calls: `reduce_scatter_tensor`, for instance, as an all-reduce.
        known = latest.partition(" ")[0] == block.function
        return cls(name, latest if known else block.function, numbers, texts)

    def tell(self, group: str, text: str) -> str:
        """`is in broadcast of 3 x torch.float32`, or `has called` it, where that is not known."""
        if self.waits_in == group and (
            not text or text == self.text_of(group, self.numbers[group])
        ):
            return f"is in {self.call}"
        return f"has called {text}"

    def text_of(self, group: str, number: int) -> str:
        """Returns this rank's call of that number; "" if it is unknown or another thread's."""
        texts = self.texts.get(group, [])
        place = number - self.numbers.get(group, 0) - 1 + len(texts)
        return texts[place] if 0 <= place < len(texts) else ""


def find_mismatch(positions: Mapping[int, Position]) -> str:
    """Returns a line that names the calls of two ranks that cannot both be right; "" if none."""
    # Most ranks have one position, so only different ones are compared.
    ranks: dict[str, list[int]] = {}
    for rank, position in positions.items():
        ranks.setdefault(repr(position), []).append(rank)
    for first, second in permutations(ranks.values(), 2):
        if calls := _difference(positions[first[0]], positions[second[0]]):
            told = [_told(*one) for one in zip((first, second), calls, strict=True)]
            same = "all ranks must call the same collectives in the same order"
            return f"{' while '.join(told)}: {same}"
    return ""


def _told(ranks: list[int], calls: str) -> str:
    verb, _, rest = calls.partition(" ")
    if len(ranks) > 1:
        verb = {"is": "are", "has": "have"}[verb]
    return f"{name_ranks(ranks)} {verb} {rest}"


def _difference(one: Position, other: Position) -> tuple[str, str] | None:
    """Returns the two ranks' calls if `other`, which waits, is in another one than `one`."""
    for group in one.texts.keys() & other.texts.keys():
        if group.startswith(AVERAGES):
            continue  # the barrier compares these
        last = min(one.numbers[group], other.numbers[group])
        for number in range(max(1, last - _MOST_CALLS), last + 1):
            texts = one.text_of(group, number), other.text_of(group, number)
            if all(texts) and texts[0] != texts[1]:
                return one.tell(group, texts[0]), other.tell(group, texts[1])
    if not other.waits_in:
        return None
    if one.call == MONITORED and other.call != MONITORED and one.waits_in in other.numbers:
        return f"is in {one.call}", f"is in {other.call}"
    waits_in = other.waits_in
    if other.numbers.get(waits_in, 0) <= one.numbers.get(waits_in, sys.maxsize):
        return None
    for group in one.numbers.keys() & other.numbers.keys():
        missed = range(other.numbers[group] + 1, one.numbers[group] + 1)
        lacking = [one.text_of(group, number) for number in missed]
        # Another group's calls are independent, unless this rank waits there for the other.
        together = AVERAGES + group == waits_in or group == AVERAGES + waits_in
        if lacking and all(lacking) and (together or one.waits_in == group):
            return one.tell(group, lacking[0]), f"is in {other.call}"
    return None
