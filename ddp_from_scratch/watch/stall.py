"""Reports a stalled step: the bucket, ranks and parameters it waits for, and where they are."""

import json
import os
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.backend.transport import this_machine
from ddp_from_scratch.common import gpu, whereabouts
from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.common.group import check_group, timeout_of
from ddp_from_scratch.common.log import logger
from ddp_from_scratch.common.process import Process
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.watch.place import place_of

DEFAULT_S = 60.0  # as in Horovod
_WAKES = 3  # how many times a watch wakes up in `after` seconds
# Watches so far, by group. Its ranks make them in the same order, so their store keys match.
_made: Counter[str] = Counter()


class StepProgress(NamedTuple):
    """A Reducer's position in a step. Two positions are equal if nothing happened in between."""

    step: int  # the number of averages before this one
    # The first bucket in flight, or the end of backward; None if the step waits for no rank.
    waits_for: str | None
    text: str  # which gradients have arrived on this rank, and which are missing

    @classmethod
    def of(cls, reducer: CoreReducer) -> "StepProgress":
        """Reads the position of the current step. Any thread may call it."""
        # Reads the buckets once, because they may be rebuilt meanwhile.
        launched, buckets, names = reducer.average.next_bucket, reducer.all_buckets, reducer.names
        waits = "the end of the backward pass" if 0 < launched == len(buckets) else None
        if under_way := [bucket for bucket in buckets[:launched] if not bucket.arrived]:
            inside = shortened([names[index] for index in under_way[0].members], 3)
            waits = f"bucket {under_way[0].index()} of {len(buckets)} ({inside})"
        # Only unlaunched buckets: an unpacked one already counts its members as missing again.
        missing = [sorted(b.missing.difference([*b.deferred])) for b in buckets[launched:]]
        count = len(names) - sum(map(len, missing))
        text = f"{count} of {len(names)} gradients have arrived"
        if missing and missing[0]:
            inside = shortened([names[index] for index in missing[0]])
            text += f", bucket {launched} waits for {inside}"
        return cls(reducer.iteration, waits, text)

    def publish(self, store: dist.Store, rank: int, place: str) -> None:
        """Writes the position, and where the program is, for ranks that wait for this one."""
        store.set(str(rank), json.dumps([self.step, self.waits_for, self.text, place]))

    def of_rank(self, store: dist.Store, rank: int) -> str:
        """Returns what is known of a rank, for a report of the step in which this one waits."""
        published, state = self._published_by(store, rank), _state_of(store, rank)
        if state is None:  # on another machine
            return published or f"no report: it has ended, {_WHY_SILENT}"
        if not state:
            return published or f"no report: it {_WHY_SILENT}"
        return f"{state}; {published}" if published else state

    def _published_by(self, store: dist.Store, rank: int) -> str:
        """Returns where a rank is; empty if it has published nothing of this step."""
        if not store.check([str(rank)]) or not (published := store.get(str(rank))):
            return ""
        step, waits_for, text, place = json.loads(published)
        # A rank may have all averages of a step before it counts that step.
        if abs(step - self.step) > 1:
            return ""
        # A rank that waits for the same bucket is not the one to look at.
        waits_too = (step, waits_for) == (self.step, self.waits_for)
        return str(text) if waits_too or not place else f"{text}\n    in {place}"


_WHY_SILENT = "has continued, runs C code that holds the GIL, or has no stall_after"


def _introduce(store: dist.Store, rank: int) -> None:
    """Writes which process this rank is."""
    process = Process.of(os.getpid())
    store.set(f"{rank} is", json.dumps([this_machine(), str(process)]))


def _state_of(store: dist.Store, rank: int) -> str | None:
    """Says that a rank's process has ended or is stopped; "" if it runs, None if unknown."""
    if not store.check([f"{rank} is"]):
        return None
    machine, text = json.loads(store.get(f"{rank} is"))
    process = Process.parse(text)
    if process is None or machine != this_machine() or not process.is_visible:
        return None
    if not process.is_alive():
        return f"process {process.pid} has ended"
    if process.is_stopped():
        return f"process {process.pid} is stopped, until kill -CONT {process.pid}"
    return ""


def stall_watch(after: float | str | None, device: torch.device) -> "StallWatch | None":
    """Returns the watch for `Reducer(stall_after=after)`, or None if there is to be none."""
    if after == "auto":
        after = None if gpu.is_gpu(device) else DEFAULT_S
    if after is None:
        return None
    if isinstance(after, str) or not 0 < after < float("inf"):
        raise ValueError(
            f"stall_after must be a positive number of seconds, None or 'auto', got {after!r}"
        )
    return GpuStallWatch(after) if gpu.is_gpu(device) else StallWatch(after)


class StallWatch(Observer):
    """A thread that checks a Reducer regularly and reports a step that makes no progress.

    It wakes three times in `after` seconds. If the step has not progressed, this rank publishes its
    progress, and the line that the program executes. After `after` seconds with a bucket in flight,
    one rank logs every rank's progress, once per step. `after` is at most half the group's timeout,
    so that the error at the timeout says where the missing ranks are, too (`whereabouts`).

    The thread ends with the Reducer or with the group; another one begins with another group
    (`set_step`). One rank alone waits for nobody, and has no thread.
    """

    def __init__(self, after: float) -> None:
        self._longest = after

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        group = reducer.process_group or dist.group.WORLD
        assert group is not None
        name = str(group.group_name)
        _made[name] += 1
        self._key = f"ddp stall/{name}/{_made[name]}"
        self._program = threading.get_ident()  # the thread that trains
        self._thread: threading.Thread | None = None
        self._start(reducer)
        # Unlike `__del__`, a finalizer also runs at interpreter exit.
        weakref.finalize(reducer, self._end)

    def _start(self, reducer: CoreReducer) -> None:
        group = check_group(reducer.process_group)
        self._after = self._longest
        with suppress(RuntimeError, AttributeError):  # a backend that does not tell its timeout
            native = traits(group).native
            timeout = timeout_of(group) if native is None else native.timeout
            self._after = min(self._longest, timeout.total_seconds() / 2)
        self._rank, self._ranks = reducer.rank, dist.get_process_group_ranks(group)
        if len(self._ranks) == 1:
            return
        _introduce(self._store(), self._rank)
        self._stop = threading.Event()
        name, stop = "ddp stall watch", [self._stop]
        self._thread = threading.Thread(target=self._run, args=stop, name=name, daemon=True)
        self._thread.start()
        whereabouts.sources.add(self)

    def on_set_step(self) -> None:
        self._end()
        self._start(self._reducer())

    def whereabouts(self, rank: int, waited: float) -> str:
        """Says where a rank of the default group was less than `waited` seconds ago."""
        # The rank looks three times in `after` seconds, and publishes what it sees twice.
        if rank not in self._ranks or self._after > waited or not dist.is_initialized():
            return ""
        try:
            index, store = self._ranks.index(rank), self._store()
            if state := _state_of(store, index):
                return f"does not answer: {state}"
            if not store.check([str(index)]) or not (published := store.get(str(index))):
                return ""
        except RuntimeError:  # the store is gone
            return ""
        *_, place = json.loads(published)
        return f"is in {place}" if place else ""

    def _end(self) -> None:
        if self._thread is None:
            return
        whereabouts.sources.discard(self)
        self._stop.set()
        # The thread may drop the last reference to the Reducer itself, and cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._thread = None

    def _run(self, stop: threading.Event) -> None:
        before = published = None
        since, reported = 0.0, -1  # when it reached `before`, and the step of the last report
        with suppress(RuntimeError, ValueError, KeyError):  # the group has been destroyed
            while not stop.wait(self._after / _WAKES) and dist.is_initialized():
                now = self._look()
                if now is None or stop.is_set():
                    break
                if now != before:
                    before, since = now, time.monotonic()
                    if published is not None:
                        self._retract()
                        published = None
                    continue
                place = place_of(self._program)
                if (now, place) != published:
                    now.publish(self._store(), self._rank, place)
                    published = now, place
                waited = time.monotonic() - since
                if now.waits_for and waited > 0.99 * self._after and now.step != reported:
                    reported = now.step
                    self._report_once(now, waited)
            if published is not None:
                self._retract()

    def _retract(self) -> None:
        """Takes back what this rank has published: it has moved on, or ends its watch."""
        self._store().set(str(self._rank), "")

    def _report_once(self, now: StepProgress, waited: float) -> None:
        store = self._store()
        # Only the first rank to get here writes the report.
        if store.add(f"report {now.step}", 1) == 1:
            logger.warning(self._report(now, waited, store))

    def _store(self) -> dist.Store:
        """Returns where the ranks meet, since the group's collectives are stuck."""
        group = dist.distributed_c10d._get_default_group()
        if (native := traits(group).native) is not None:
            native.install_store()
        return dist.PrefixStore(self._key, dist.distributed_c10d._get_default_store())

    def _look(self) -> StepProgress | None:
        # The thread must not keep the Reducer alive, nor the store except while it reports.
        reducer = self._reducer()
        return None if reducer is None else StepProgress.of(reducer)

    def _report(self, now: StepProgress, waited: float, store: dist.Store) -> str:
        who = f"step {now.step}, rank {self._rank}"
        lines = [f"{who}: has waited {waited:.0f} s for {now.waits_for}"]
        for rank in range(len(self._ranks)):
            lines.append(f"  rank {rank}: {now.of_rank(store, rank)}")
        lines.append("The step keeps waiting until the process group's timeout ends the run.")
        return "\n".join(lines)


class _GpuAverage(NamedTuple):
    """A bucket that a GPU has been told to average."""

    number: int  # counts all buckets of all steps
    step: int
    bucket: int  # its index


class GpuStallWatch(StallWatch):
    """The watch of a Reducer on a GPU, which lags behind the program.

    The GPU writes to host memory which buckets it has averaged: two kernel launches for each. A
    query of an event would invalidate a graph capture in another thread.
    """

    def __init__(self, after: float) -> None:
        super().__init__(after)
        self._in_flight: deque[_GpuAverage] = deque()  # those that are not known to be over
        self._number = 0
        self._on_gpu: torch.Tensor | None = None  # the number of the last one that is averaged
        self._on_host = torch.zeros((), dtype=torch.int64, device="cpu")

    def on_unpacked(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        device = bucket.parameters()[0].device
        if not gpu.is_gpu(device) or gpu.is_capturing():
            return
        if self._on_gpu is None:
            self._on_gpu = torch.zeros((), dtype=torch.int64, device=device)
            self._on_host = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
        self._number += 1
        self._in_flight.append(_GpuAverage(self._number, iteration, bucket.index()))
        self._on_gpu.fill_(self._number)
        self._on_host.copy_(self._on_gpu, non_blocking=True)
        while self._in_flight and self._in_flight[0].number <= int(self._on_host):
            self._in_flight.popleft()

    def _look(self) -> StepProgress | None:
        now, over = super()._look(), int(self._on_host)
        left = [average for average in self._in_flight.copy() if average.number > over]
        if now is None or not left:
            return now
        # The host is ahead of the GPU, so `now` already counts gradients of the next step.
        step = left[0].step
        text = f"all gradients of step {step} have arrived, and since then {now.text}"
        return StepProgress(step, f"bucket {left[0].bucket}", text)
