"""`timeline`: records steps of all ranks on one clock and writes them in four forms."""

import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import PeerError, UsageError, one_line
from ddp_from_scratch.group import check_group, gloo_beside, on_gpu_of, takes_cpu_tensors
from ddp_from_scratch.watch import render
from ddp_from_scratch.watch.record import RankTimes, Record, moved, rank_times, step_times
from ddp_from_scratch.watch.recorder import BucketRecorder, Layout, Watched

SKIP = 3  # averages before the first recorded step; the first of them rebuilds the buckets
TOO_FEW = 'no timeline: too few steps, which with bucket_cap_mb="auto" are those after its trials'
_ROUNDS, _TAG = 20, 0  # of the messages that compare clocks


class Timeline:
    """Records some steps, as `timeline` does. The constructor and `close` are collective."""

    def __init__(
        self, reducer: Watched, folder: Path | str | None, steps: int = 5, skip: int = SKIP
    ) -> None:
        if steps < 1 or skip < 0:
            raise UsageError(f"a timeline has 1 step or more after 0 or more, got {steps}, {skip}")
        self.record: Record | None = None  # equal on every rank, once its steps are complete
        self.has_picture = False  # True if rank 0 has matplotlib
        self._reducer, self._steps = reducer, steps
        self.folder = None if folder is None else Path(folder)
        group = check_group(reducer.process_group)
        self._group = group if takes_cpu_tensors(group) else gloo_beside(group)
        self._rank = self._group.rank()
        if self.folder is not None:
            self._on_rank_0(partial(_make, self.folder))
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        # The boot is part of a machine's name, since each boot resets its clock.
        self._hosts: list[str] = _gather(f"{socket.gethostname()}/{boot}", self._group)
        self._clocks = clock_offsets(self._hosts, self._group)
        self._recorder = BucketRecorder(reducer, skip, self._at_average)
        self._open = True

    def _at_average(self, iteration: int) -> None:
        # One average later, when every rank has ended the last step.
        if iteration > self._recorder.first + self._steps:
            self.close()

    def close(self) -> None:
        """Ends the recording, gathers it and writes it. Collective, idempotent."""
        if not self._open:
            return
        self.discard()
        with on_gpu_of(self._reducer.module):
            self.record = self._gathered()
        if self.record is not None and self.folder is not None:
            self.has_picture = bool(self._on_rank_0(partial(write, self.record, self.folder)))

    def discard(self) -> None:
        """Ends the recording and drops it on this rank. Idempotent."""
        if self._open:
            self._open = False
            self._recorder.close()

    def _on_rank_0(self, write: Callable[[], object]) -> object:
        """Calls `write` on rank 0; if that fails, other ranks raise a PeerError. Collective."""
        result: object = None
        text, caught = "", None
        try:
            if self._rank == 0:
                result = write()
        # Any error, such as one of matplotlib, since the other ranks wait for the result.
        except Exception as error:  # noqa: BLE001
            text, caught = f"cannot write the timeline to {self.folder}: {one_line(error)}", error
        result, text = _gather((result, text), self._group)[0]
        if text:
            raise (UsageError if caught else PeerError)(text) from caught
        return result

    def _gathered(self) -> Record | None:
        marks, mine = self._recorder.marks, self._recorder.complete()[: self._steps]
        own = {s.iteration: (s.layout, rank_times(self._rank, marks, s)) for s in mine}
        ranks: list[dict[int, tuple[Layout, RankTimes]]] = _gather(own, self._group)
        after = clock_offsets(self._hosts, self._group)
        clocks = list(zip(self._clocks, after, strict=True))
        steps = []
        for number, (layout, _) in sorted(ranks[self._rank].items()):
            if all(number in found for found in ranks):
                times = [
                    moved(found[number][1], (before[0] + after[0]) / 2)
                    for found, (before, after) in zip(ranks, clocks, strict=True)
                ]
                steps.append(step_times(number, layout, times))
        if not steps:
            return None
        # Half a round trip, plus half of the clocks' drift between the two comparisons.
        error = max(max(b[1], a[1]) + abs(a[0] - b[0]) / 2 for b, a in clocks)
        reducer = self._reducer
        # Not by `requires_grad`, since a GAN may have frozen its critic meanwhile.
        averaged = {name for bucket in steps[0].layout for name in bucket}
        sizes = {n: p.nbytes for n, p in reducer.module.named_parameters() if n in averaged}
        title = (
            f"{type(reducer.module).__name__}, {sum(sizes.values()) / 2**20:.3g} MiB of gradients, "
            f"{len(ranks)} rank{'s'[: len(ranks) != 1]} by {reducer.stats().transport}"
        )
        return Record(title, sizes, tuple(self._hosts), error, tuple(steps))


@contextmanager
def timeline(
    reducer: Watched, folder: Path | str, steps: int = 5, skip: int = SKIP
) -> Iterator[Timeline]:
    """Records steps inside the context and writes them to a folder. Every rank must enter it.

        with ddp.timeline(reducer, "timeline"):
            for batch in batches:
                ...

    When the steps are complete, or at the end of the context, rank 0 writes

    - `timeline.txt`: the median step as text;
    - `timeline.html`: a page that opens offline, with all steps;
    - `timeline.png` and `.svg`: the median step, if matplotlib is installed;
    - `trace.json`: all steps, for Perfetto and chrome://tracing.

    It writes nothing if the context raises or no step is complete; the latter is a warning. If it
    cannot write, it raises a UsageError, and the other ranks a PeerError.

    Args:
        reducer: averages the module whose steps are recorded.
        folder: rank 0 makes it if needed.
        steps: the number of steps to record.
        skip: averages before the first recorded step, which rebuild buckets and allocate memory.
    """
    recorded = Timeline(reducer, folder, steps, skip)
    try:
        yield recorded
    except BaseException:
        recorded.discard()
        raise
    recorded.close()
    if recorded.record is None and dist.get_rank(reducer.process_group) == 0:
        warnings.warn(TOO_FEW, stacklevel=3)


def write(record: Record, folder: Path) -> bool:
    """Writes all forms of a record; returns False if there is no matplotlib for a picture."""
    text = render.as_text(record, record.typical)
    (folder / "timeline.txt").write_text(text + "\n", encoding="utf-8")
    for name, form in ("timeline.html", render.as_html), ("trace.json", render.as_json):
        # In parts, since the text of a thousand steps takes more memory than the steps.
        with (folder / name).open("w", encoding="utf-8") as file:
            file.writelines(form(record))
    return render.draw(record, record.typical, folder / "timeline.png", folder / "timeline.svg")


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # An unwritable folder should fail now, not in the middle of training.
    TemporaryFile(dir=folder).close()


def _gather(own: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group)
    return found


def clock_offsets(hosts: Sequence[str], group: dist.ProcessGroup) -> list[tuple[float, float]]:
    r"""Returns the ms to add to each rank's clock to get rank 0's, and the error. Collective.

    The first rank of every other machine exchanges messages with rank 0:

        rank 0        t0 ------.             .------> t1
                                \           /
        other rank               '--> t ---'        t is taken to be (t0 + t1) / 2

    The fastest of several rounds counts; its error is at most half of its round-trip time. See
    Cristian, "Probabilistic clock synchronization" (1989).
    """
    found = torch.zeros(len(hosts), 2, dtype=torch.float64)
    there = torch.zeros(1, dtype=torch.float64)
    firsts = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
    for other in firsts[1:]:
        rounds = []
        # The group's own methods, since torch's functions reject an unlisted group (`open_gloo`).
        for _ in range(_ROUNDS):
            if group.rank() == 0:
                began = time.perf_counter()
                group.send([there], other, _TAG).wait()
                group.recv([there], other, _TAG).wait()
                ended = time.perf_counter()
                rounds.append((ended - began, (began + ended) / 2 - there.item()))
            elif group.rank() == other:
                group.recv([there], 0, _TAG).wait()
                there.fill_(time.perf_counter())
                group.send([there], 0, _TAG).wait()
        if rounds:
            way, offset = min(rounds)
            found[other] = torch.tensor((offset * 1e3, way / 2 * 1e3), dtype=torch.float64)
    dist.broadcast(found, group=group, group_src=0)
    return [tuple(found[hosts.index(host)].tolist()) for host in hosts]
