"""Reports a step that stalls, with the bucket, ranks and parameters that it waits for."""

import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.backend.process_group import SharedMemoryGroup
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.errors import shortened

# Number of looks at a wait before it is reported.
_WAKES = 3
# Watches so far, by group: its ranks make them in one order, so keys in the store are alike.
_made: Counter[str] = Counter()


class Progress(NamedTuple):
    """A Reducer's position in a step; equal to an earlier one if nothing happened in between."""

    step: int  # the number of averages before this one
    # The first bucket under way, or the end of backward; None if the step waits for no rank.
    bucket: str | None
    text: str  # the gradients that have arrived on this rank, and those that are missing

    @classmethod
    def of(
        cls, step: int, launched: int, buckets: Sequence[Bucket], names: Sequence[str]
    ) -> "Progress":
        """Reads the position, in any thread, of a step that has launched the first buckets."""
        waits = "the end of the backward pass" if 0 < launched == len(buckets) else None
        for bucket in buckets[:launched]:
            if not bucket.arrived:
                inside = shortened([names[index] for index in bucket.members], 3)
                waits = f"bucket {bucket.index()} of {len(buckets)} ({inside})"
                break
        # Buckets that are unpacked miss all their members again, for the next step.
        missing = [sorted(b.missing.difference([*b.noted])) for b in buckets[launched:]]
        count = len(names) - sum(map(len, missing))
        text = f"{count} of {len(names)} gradients have arrived"
        if missing and missing[0]:
            inside = shortened([names[index] for index in missing[0]])
            text += f", bucket {launched} waits for {inside}"
        return cls(step, waits, text)


class StallWatch(Extension):
    """A thread that looks at a Reducer from time to time, and reports a step that does not move on.

    It wakes three times in `after` seconds. A step that has moved on costs nothing more; on a GPU,
    8 bytes are copied to the host for each bucket. A step that has not moved publishes this rank's
    progress, once. After `after` seconds with a bucket under way, every rank's progress is written
    to standard error, by one rank, once in a step.

    The thread ends with the Reducer, of which `progress` is a bound method, with the process group,
    or with the process.
    """

    def __init__(
        self,
        after: float,
        progress: Callable[[], Progress],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        if not 0 < after < float("inf"):
            raise ValueError(f"stall_after must be a positive number of seconds, got {after}")
        # The thread holds this watch, and the group's store only while it reports.
        self._after, self._progress = after, weakref.WeakMethod(progress)
        self._under_way = _UnderWay()
        group = process_group or dist.group.WORLD
        assert group is not None
        name = str(group.group_name)
        _made[name] += 1
        self._key = f"ddp stall/{name}/{_made[name]}"
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddp stall watch", daemon=True)
        self._thread.start()
        # Not __del__: this runs at Python's exit, too.
        weakref.finalize(cast(MethodType, progress).__self__, self._end)

    def on_finished(self, iteration: int, bucket: Bucket, takes_part: bool) -> None:
        # The host does not wait for a GPU.
        device = bucket.parameters()[0].device
        if gpu.is_gpu(device) and not gpu.is_capturing():
            self._under_way.add(iteration, bucket.index(), device)

    def _end(self) -> None:
        self._stop.set()
        # The thread itself may drop the last reference to the Reducer, and cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        with suppress(RuntimeError, ValueError):  # the group may be destroyed already
            own = [_machine(), os.getpid(), _state(os.getpid())[1]]
            self._store().set(f"process {self._rank}", json.dumps(own))
        before = published = None
        # The time since which `before` holds, and the step of the last report.
        since, reported = 0.0, -1
        # The event ends a wait early when the Reducer is gone.
        while not self._stop.wait(self._after / _WAKES) and dist.is_initialized():
            now = self._look()
            if now is None:
                return
            if now != before:
                before, since = now, time.monotonic()
                continue
            try:
                store = self._store()
                if now != published:
                    store.set(str(self._rank), json.dumps([now.step, now.text]))
                    published = now
                waited = time.monotonic() - since
                if now.bucket and waited > 0.99 * self._after and now.step != reported:
                    reported = now.step
                    # The first rank to count writes the report for all.
                    if store.add(f"report {now.step}", 1) == 1:
                        print(self._report(now, waited, store), file=sys.stderr, flush=True)
            except (RuntimeError, ValueError):
                # The group was destroyed meanwhile.
                return

    def _look(self) -> Progress | None:
        progress = self._progress()
        if progress is None or self._stop.is_set():
            return None
        now = progress()
        first = self._under_way.first()
        if first is None:
            return now
        # The host is ahead of the GPU: `now` counts the gradients of the next step already.
        step, index = first
        text = f"all gradients of step {step} have arrived, and since then {now.text}"
        return Progress(step, f"bucket {index}", text)

    def _store(self) -> dist.Store:
        # Through the group's store: its own collectives are what is stuck.
        group = dist.distributed_c10d._get_default_group()
        if isinstance(group, SharedMemoryGroup):
            group.install_store()
        return dist.PrefixStore(self._key, dist.distributed_c10d._get_default_store())

    def _report(self, now: Progress, waited: float, store: dist.Store) -> str:
        lines = [f"step {now.step}, rank {self._rank}: has waited {waited:.0f} s for {now.bucket}"]
        for rank in range(self._world_size):
            process = _process_in_words(store, rank)
            text = process or "nothing is known of it: it has gone on, ended, or does not watch"
            if store.check([str(rank)]):
                step, published = json.loads(store.get(str(rank)))
                text = f"{text} (last heard of at {step})"
                # A rank may have all averages of the last step and not have counted them yet.
                if abs(step - now.step) <= 1:
                    stopped = process in (_ENDED, _STOPPED)
                    text = f"{published}; {process}" if stopped else published
            lines.append(f"  rank {rank}: {text}")
        lines.append("The step keeps waiting until the process group's timeout ends the run.")
        return "\n".join(lines)


class _UnderWay:
    """The buckets that a GPU has not averaged yet. Reading them makes no call to CUDA.

    A query of an event in one thread invalidates the capture of a graph in another. So the GPU
    writes the number of the last bucket that it has averaged to the host's memory.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int, int]] = deque()  # (number, step, bucket)
        self._number = 0
        self._on_gpu: torch.Tensor | None = None
        self._on_host = torch.zeros((), dtype=torch.int64)

    def add(self, step: int, index: int, device: torch.device) -> None:
        if self._on_gpu is None:
            self._on_gpu = torch.zeros((), dtype=torch.int64, device=device)
            self._on_host = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._number += 1
        self._buckets.append((self._number, step, index))
        self._on_gpu.fill_(self._number)
        self._on_host.copy_(self._on_gpu, non_blocking=True)
        while self._buckets and self._buckets[0][0] <= int(self._on_host):
            self._buckets.popleft()

    def first(self) -> tuple[int, int] | None:
        """The step and the index of the first one, in any thread."""
        over = int(self._on_host)
        left = (bucket[1:] for bucket in self._buckets.copy() if bucket[0] > over)
        return next(left, None)


_ENDED, _STOPPED = "its process has ended", "its process is stopped (SIGSTOP)"


def _process_in_words(store: dist.Store, rank: int) -> str | None:
    if not store.check([f"process {rank}"]):
        return None
    machine, pid, started = json.loads(store.get(f"process {rank}"))
    if not machine or machine != _machine():
        return None
    found, begun = _state(pid)
    # One that began at another time has got the number of the one that ended.
    if begun is None or begun != started:
        return _ENDED
    words = {"T": _STOPPED, "t": _STOPPED, "Z": _ENDED, "X": _ENDED}
    return words.get(found, "its process runs: it has gone on")


def _state(pid: int) -> tuple[str, int | None]:
    """Returns a process's state and its start, in ticks since the machine's boot; None of none."""
    try:
        # These stand behind the program's name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    return fields[0], int(fields[19])


def _machine() -> str:
    """Names what process numbers are valid in: a machine's boot and a container; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
