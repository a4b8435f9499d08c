"""Finds a rank that computes wrongly: another rank repeats one of its virtual ranks.

A virtual rank has the same bits on every rank. So in every Nth step one of them is computed twice,
by its owner and by another rank, from the same batch, buffers and random numbers. Before the
average counts, all ranks compare checksums of its gradients and buffers. If they differ, a third
rank computes it, too, and the rank whose bits differ from the other two is named.

The check sees faults in forward and backward passes. It does not see a fault in the sum, in the
optimizer's step or on the wire: `check_every` compares parameters and states after these.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.arguments import check_whole
from ddp_from_scratch.common.errors import (
    PeerError,
    PeerWrongResultError,
    UsageError,
    WrongResultError,
)
from ddp_from_scratch.common.group import gather_objects
from ddp_from_scratch.common.process import processor_name
from ddp_from_scratch.core.bucket import Bucket, FlatBucket
from ddp_from_scratch.core.observer import Check
from ddp_from_scratch.options.buffers import BufferSync
from ddp_from_scratch.sync.check_sync import gather_integers
from ddp_from_scratch.sync.checksums import checksums

# Computes a virtual rank, whichever rank has it, and returns its gradients by parameter.
Repeat: TypeAlias = Callable[[int], Mapping[int, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A virtual rank that two ranks compute in a step.

    Attributes:
        owner: the rank whose virtual rank it is.
        checker: the rank that repeats it.
        voter: the rank that repeats it if the two differ; None with two ranks.
    """

    step: int
    virtual_rank: int
    owner: int
    checker: int
    voter: int | None

    @staticmethod
    def of(number: int, step: int, parts: Sequence[Sequence[int]]) -> "Case":
        """Returns the case of check `number`: all virtual ranks, and all pairs, take turns."""
        count, ranks = sum(map(len, parts)), len(parts)
        # An odd stride visits all of a power of two. Multiples of the golden ratio spread evenly,
        # so also the first few checks visit all ranks.
        virtual_rank = number * (int(0.618 * count) | 1) % count
        owner = next(rank for rank, part in enumerate(parts) if virtual_rank in part)
        turn = number // count % (ranks - 1)
        checker = (owner + 1 + turn) % ranks
        others = [rank for rank in range(ranks) if rank not in (owner, checker)]
        voter = others[turn % len(others)] if others else None
        return Case(step, virtual_rank, owner, checker, voter)


class Mismatch(NamedTuple):
    """Two ranks have different checksums for a case; `rows` has those of all ranks."""

    case: Case
    rows: list[list[int]]


class Recheck(Check):
    """Compares one virtual rank in every Nth step.

    Attributes:
        mismatch: what the last average has found; then `backward()` has raised on every rank.
        steps: in how many steps so far two ranks had the same bits.
    """

    def __init__(self, every: int, buffers: BufferSync) -> None:
        check_whole("recheck_every", every)
        if every < 1:
            raise ValueError(f"recheck_every must be 1 or more, got {every}")
        self._every, self._buffers = every, buffers
        self.mismatch: Mismatch | None = None
        self.steps: int = 0
        self._case: Case | None = None  # of the step under way
        # True if this rank is the owner, and the case its last virtual rank, whose gradients only
        # the buckets have.
        self._is_last = False
        # This rank's checksums: of the gradient of each parameter, and one of all buffers.
        self._mine: list[int] = []
        self._compared = False  # True once all ranks are known to be machines of one kind

    def is_due(self, step: int) -> bool:
        """True if a virtual rank is computed twice in this step."""
        return step % self._every == 0

    def begin(self, step: int, parts: Sequence[Sequence[int]], repeat: Repeat) -> None:
        """Chooses the case of this step, and repeats it on the rank that checks. Collective."""
        reducer = self._reducer()
        self._case = None
        if len(parts) == 1:
            return
        if not self._compared:
            check_machines(reducer.device, reducer.process_group)
            self._compared = True
        self._case = case = Case.of(step // self._every, step, parts)
        self._is_last = reducer.rank == case.owner and parts[case.owner][0] == case.virtual_rank
        self._mine = [0] * (len(reducer.parameters) + 1)
        if reducer.rank == case.checker:
            self._compute(case, repeat)

    def note(self, virtual_rank: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Notes the gradients of one of this rank's virtual ranks, other than the last."""
        if self._case is not None and self._case.virtual_rank == virtual_rank:
            self._note(gradients)
            self._note_buffers()

    def vote(self, mismatch: Mismatch, repeat: Repeat) -> WrongResultError:
        """Lets a third rank compute the case; returns this rank's error. Collective."""
        (case, rows), reducer = mismatch, self._reducer()
        voters = [case.owner, case.checker]
        found = [rows[rank] for rank in voters]
        failed: Exception | None = None
        if case.voter is not None:
            if reducer.rank == case.voter:
                try:
                    self._compute(case, repeat)
                except Exception as error:  # noqa: BLE001  # raised when no other rank waits
                    failed = error
            voters.append(case.voter)
            found.append(gather_integers(self._mine, reducer.process_group)[case.voter])
        hosts = gather_objects(socket.gethostname(), reducer.process_group)
        if failed is not None:
            raise failed
        what = f"{self._first_difference(found)} of virtual rank {case.virtual_rank}"
        odd = [rank for rank, row in zip(voters, found, strict=True) if found.count(row) == 1]
        wrong = odd[0] if len(odd) == 1 else None
        if wrong is not None:
            others = " and ".join(str(rank) for rank in voters if rank != wrong)
            text = (
                f"rank {wrong} on {hosts[wrong]} computes wrongly: in step {case.step}, {what} has "
                f"different bits there than on ranks {others}"
            )
        else:
            of = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in voters)
            text = (
                f"in step {case.step}, {what} has different bits on {of}: one of them computes "
                f"wrongly, or what run_virtual_ranks was given does not repeat exactly"
            )
        tells = case.owner if wrong is None else wrong
        kind = WrongResultError if reducer.rank == tells else PeerWrongResultError
        return kind(text, wrong, case.step, case.virtual_rank)

    def forget(self) -> None:
        """Ranks may have been lost, and others may join."""
        self._case = self.mismatch = None
        self._compared = False

    def _compute(self, case: Case, repeat: Repeat) -> None:
        self._mine = [0] * len(self._mine)
        before = self._buffers.snapshot()
        try:
            self._note(repeat(case.virtual_rank))
            self._note_buffers()
        finally:
            before.restore()

    def _note(self, gradients: Mapping[int, torch.Tensor]) -> None:
        # A gradient that is missing counts as zeros, whose checksum is 0, too.
        for index, number in zip(gradients, checksums([*gradients.values()]), strict=True):
            self._mine[index] = number

    def _note_buffers(self) -> None:
        # Odd factors, so that a change of one buffer always shows.
        numbers = enumerate(checksums([*self._buffers.named().values()]))
        total: int = sum((2 * index + 1) * number for index, number in numbers)
        self._mine[-1] = (total + 2**63) % 2**64 - 2**63

    def _first_difference(self, rows: Sequence[Sequence[int]]) -> str:
        columns = zip(*rows, strict=True)
        first = next(index for index, column in enumerate(columns) if len(set(column)) > 1)
        names = self._reducer().names
        return f"the gradient of {names[first]}" if first < len(names) else "a buffer"

    # As an observer -------------------------------------------------------------------------------

    def on_packed(self, bucket: Bucket) -> None:
        if self._case is not None and self._is_last and isinstance(bucket, FlatBucket):
            self._note(dict(zip(bucket.members, bucket.views, strict=True)))

    def verdict(self) -> RuntimeError | None:
        case, self._case = self._case, None
        if case is None:
            return None
        if self._is_last:
            self._note_buffers()
        rows = gather_integers(self._mine, self._reducer().process_group)
        if rows[case.owner] == rows[case.checker]:
            self.steps += 1
            return None
        self.mismatch = Mismatch(case, rows)
        return RuntimeError(f"virtual rank {case.virtual_rank} has different bits on two ranks")

    def on_abort(self) -> None:
        self._case = None


def check_machines(device: torch.device, process_group: dist.ProcessGroup | None) -> None:
    """Raises a UsageError on every rank unless all can have the same bits. Collective."""
    if difference := machine_difference(gather_objects(describe_machine(device), process_group)):
        kind = UsageError if dist.get_rank(process_group) == 0 else PeerError
        raise kind(
            f"ranks can repeat each other's work only on equal machines: {difference}; leave "
            f"recheck out, or give all the same"
        )


def describe_machine(device: torch.device) -> str:
    """Describes what the bits of a computation here depend on."""
    name = gpu.product_name() if gpu.is_gpu(device) else processor_name()
    text = f"{name}, {torch.get_num_threads()} threads"
    return f"{text}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def machine_difference(machines: Sequence[str]) -> str:
    """Names the first rank whose machine is not as rank 0's, with both; "" if all are equal."""
    for rank, machine in enumerate(machines):
        if machine != machines[0]:
            return f"rank 0 has {machines[0]}, rank {rank} has {machine}"
    return ""
