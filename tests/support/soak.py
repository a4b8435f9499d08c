"""Random collectives on the mpi backend, checked against numpy, for as long as you like.

    mpirun -n 4 python -m tests.support.soak --operations 20000 --seed 1

Kinds, shapes, dtypes, reductions, roots, groups and the number of operations under way at once are
drawn from one seed, alike on all ranks; each rank computes with numpy what it must receive. Every
few hundred operations one of the groups, which overlap, makes way for another. Prints the memory
of every rank at the start (when a tenth is done), in the middle and at the end: what is resident,
and, with glibc, what is allocated. Exit code 1 on a wrong result, or when from the middle to the
end what is allocated grew by more than --growth-mb, or what is resident by more than four times
that (some thousand operations are needed until it stays the same).
"""

import argparse
import ctypes
import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import ddp_from_scratch as ddp

Op = dist.ReduceOp
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, torch.uint8, *SIGNED, *COMPLEX, torch.bool)
# `Plan.values` are small, so that results are exact whatever the order of the ranks.
REDUCTIONS: dict[Any, Callable[..., Any]] = {
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}
GROUPS = 6  # besides the default one
OPERATIONS_PER_GROUP = 400


@dataclass
class Group:
    """A process group and the ranks in it; `handle` is torch's."""

    ranks: list[int]
    handle: Any


@dataclass
class Pending:
    """An operation under way: what to wait for, and how to check it then."""

    what: str
    handles: list[Any]
    check: Callable[[], bool]


class Plan:
    """The random choices of one operation, the same on every rank.

    Rank r's values come from (seed, operation, r), so that any rank can compute everyone's.
    """

    def __init__(self, seed: int, number: int, groups: list[Group]) -> None:
        self.seed, self.number = seed, number
        choose = self.choose = random.Random(f"{seed} {number}")
        self.group = choose.choice(groups)
        self.size = len(self.group.ranks)
        self.kind = choose.choice(sorted(KINDS))
        self.dtype = choose.choice(DTYPES)
        self.op = choose.choice(self._reductions())
        self.root = choose.randrange(self.size)
        # Mostly small, now and then a megabyte; sometimes no element at all.
        largest = choose.choice((1, 8, 100, 1000, 1000, 10_000, 100_000))
        self.count = choose.randrange(largest + 1)
        self.strided = choose.random() < 0.2
        self.depth = choose.choice((0, 0, 1, 4, 16))

    def __str__(self) -> str:
        return (
            f"operation {self.number}, {self.kind} of {self.count} {self.dtype} ({self.op}, root "
            f"{self.root}, strided {self.strided}) on ranks {self.group.ranks}"
        )

    def _reductions(self) -> list[Any]:
        if self.dtype in COMPLEX:
            return [Op.SUM]
        if self.dtype == torch.bool:
            return [Op.SUM, Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR]
        ordered = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
        return [*ordered, Op.AVG] if self.dtype in FLOATS else list(REDUCTIONS)

    def values(self, member: int, count: int) -> "np.ndarray[Any, Any]":
        """What the group's `member` contributes: 16-bit floats as float32."""
        draw = np.random.default_rng([self.seed, self.number, self.group.ranks[member]])
        if self.dtype == torch.bool:
            return draw.integers(0, 2, count).astype(bool)
        low, high = (-3, 4) if self.dtype != torch.uint8 else (0, 4)  # at most 3 to the size
        numbers = draw.integers(low, high, count)
        if self.dtype in COMPLEX:
            return (numbers + 1j * draw.integers(low, high, count)).astype(numpy_type(self.dtype))
        return numbers.astype(numpy_type(self.dtype))

    def tensor(self, values: "np.ndarray[Any, Any]") -> torch.Tensor:
        """As a tensor of the dtype, every second element of a longer one where that was drawn."""
        tensor = torch.from_numpy(values).to(self.dtype)
        return torch.stack([tensor, tensor], -1)[:, 0] if self.strided else tensor.clone()

    def empty(self, count: int) -> torch.Tensor:
        return self.tensor(np.zeros(count, dtype=numpy_type(self.dtype)))

    def reduced(self, count: int) -> "np.ndarray[Any, Any]":
        contributions = [self.values(member, count) for member in range(self.size)]
        if self.dtype == torch.bool:  # a sum is "any", a product "all"
            combine = {Op.SUM: np.logical_or, Op.PRODUCT: np.logical_and}.get(self.op)
            return np.asarray((combine or REDUCTIONS[self.op]).reduce(contributions))
        if self.op == Op.AVG:
            return np.asarray(np.add.reduce(contributions) / numpy_type(self.dtype)(self.size))
        reduced = np.asarray(REDUCTIONS[self.op].reduce(contributions))
        return reduced.astype(numpy_type(self.dtype))

    def counts(self) -> list[int]:
        """A size for each member."""
        draw = random.Random(f"{self.seed} {self.number} sizes")
        return [draw.randrange(self.count + 1) for _ in range(self.size)]


def numpy_type(dtype: torch.dtype) -> Any:
    narrow = dtype in FLOATS and dtype.itemsize == 2
    return torch.empty(0, dtype=torch.float32 if narrow else dtype).numpy().dtype.type


def same(tensor: torch.Tensor, expected: "np.ndarray[Any, Any]") -> bool:
    return torch.equal(tensor, torch.from_numpy(expected).to(tensor.dtype))


def all_same(tensors: list[torch.Tensor], expected: "list[np.ndarray[Any, Any]]") -> bool:
    return all(same(t, e) for t, e in zip(tensors, expected, strict=True))


# Each kind starts its operation on member `me` and says how to check what came of it.

Started = tuple[list[Any], Callable[[], bool]]


def all_reduce(plan: Plan, me: int) -> Started:
    tensor = plan.tensor(plan.values(me, plan.count))
    handle = dist.all_reduce(tensor, plan.op, plan.group.handle, async_op=True)
    return [handle], lambda: same(tensor, plan.reduced(plan.count))


def reduce(plan: Plan, me: int) -> Started:
    tensor = plan.tensor(plan.values(me, plan.count))
    root = plan.group.ranks[plan.root]
    handle = dist.reduce(tensor, root, plan.op, plan.group.handle, async_op=True)
    if me != plan.root:
        return [handle], lambda: True  # what is left elsewhere is not defined
    return [handle], lambda: same(tensor, plan.reduced(plan.count))


def reduce_scatter(plan: Plan, me: int) -> Started:
    counts = plan.counts()
    ends = np.cumsum(counts)
    values = plan.values(me, int(ends[-1]))
    output = plan.empty(counts[me])
    parts = [plan.tensor(part.copy()) for part in np.split(values, ends[:-1])]
    handle = dist.reduce_scatter(output, parts, plan.op, plan.group.handle, async_op=True)
    own = slice(int(ends[me]) - counts[me], int(ends[me]))
    return [handle], lambda: same(output, plan.reduced(int(ends[-1]))[own].copy())


def reduce_scatter_tensor(plan: Plan, me: int) -> Started:
    whole = plan.count * plan.size
    output = plan.empty(plan.count)
    handle = dist.reduce_scatter_tensor(
        output, plan.tensor(plan.values(me, whole)), plan.op, plan.group.handle, async_op=True
    )
    own = slice(me * plan.count, (me + 1) * plan.count)
    return [handle], lambda: same(output, plan.reduced(whole)[own].copy())


def broadcast(plan: Plan, me: int) -> Started:
    tensor = plan.tensor(plan.values(me, plan.count))
    root = plan.group.ranks[plan.root]
    handle = dist.broadcast(tensor, root, plan.group.handle, async_op=True)
    return [handle], lambda: same(tensor, plan.values(plan.root, plan.count))


def all_gather(plan: Plan, me: int) -> Started:
    counts = plan.counts()
    outputs = [plan.empty(count) for count in counts]
    tensor = plan.tensor(plan.values(me, counts[me]))
    handle = dist.all_gather(outputs, tensor, plan.group.handle, async_op=True)
    return [handle], lambda: all_same(outputs, [plan.values(r, c) for r, c in enumerate(counts)])


def all_gather_into_tensor(plan: Plan, me: int) -> Started:
    output = plan.empty(plan.count * plan.size)
    tensor = plan.tensor(plan.values(me, plan.count))
    handle = dist.all_gather_into_tensor(output, tensor, plan.group.handle, async_op=True)
    return [handle], lambda: same(output, everyones(plan))


def everyones(plan: Plan) -> "np.ndarray[Any, Any]":
    return np.concatenate([plan.values(member, plan.count) for member in range(plan.size)])


def gather(plan: Plan, me: int) -> Started:
    outputs = [plan.empty(plan.count) for _ in range(plan.size)] if me == plan.root else None
    tensor, root = plan.tensor(plan.values(me, plan.count)), plan.group.ranks[plan.root]
    handle = dist.gather(tensor, outputs, root, plan.group.handle, async_op=True)
    return [handle], lambda: outputs is None or same(torch.cat(outputs), everyones(plan))


def scatter(plan: Plan, me: int) -> Started:
    output = plan.empty(plan.count)
    sent = np.split(plan.values(plan.root, plan.count * plan.size), plan.size)
    parts = [plan.tensor(part.copy()) for part in sent] if me == plan.root else None
    root = plan.group.ranks[plan.root]
    handle = dist.scatter(output, parts, root, plan.group.handle, async_op=True)
    return [handle], lambda: same(output, sent[me].copy())


def all_to_all(plan: Plan, me: int) -> Started:
    counts = plan.counts()  # of what each member sends to every other
    outputs = [plan.empty(count) for count in counts]
    sent = [np.split(plan.values(r, c * plan.size), plan.size) for r, c in enumerate(counts)]
    inputs = [plan.tensor(part.copy()) for part in sent[me]]
    handle = dist.all_to_all(outputs, inputs, plan.group.handle, async_op=True)
    return [handle], lambda: all_same(outputs, [parts[me].copy() for parts in sent])


def all_to_all_single(plan: Plan, me: int) -> Started:
    counts = plan.counts()  # of what each member gets from every other
    ends = np.cumsum(counts)
    output = plan.empty(counts[me] * plan.size)
    handle = dist.all_to_all_single(
        output,
        plan.tensor(plan.values(me, int(ends[-1]))),
        [counts[me]] * plan.size,
        counts,
        plan.group.handle,
        async_op=True,
    )
    own = slice(int(ends[me]) - counts[me], int(ends[me]))
    expected = [plan.values(member, int(ends[-1]))[own] for member in range(plan.size)]
    return [handle], lambda: same(output, np.concatenate(expected))


def coalesced(plan: Plan, me: int) -> Started:
    tensors = [plan.tensor(plan.values(me, plan.count)) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(plan.group.handle, async_ops=True) as handle:
        for tensor in tensors:
            dist.all_reduce(tensor, plan.op, plan.group.handle)
    return [handle], lambda: all_same(tensors, [plan.reduced(plan.count)] * 3)


def ring(plan: Plan, me: int) -> Started:
    """A message to the next member, with a tag, and one from the member before."""
    before, after = (plan.group.ranks[(me + step) % plan.size] for step in (-1, 1))
    tensor, received = plan.tensor(plan.values(me, plan.count)), plan.empty(plan.count)
    operations = [
        dist.P2POp(dist.isend, tensor, after, plan.group.handle, plan.number % 1000),
        dist.P2POp(dist.irecv, received, before, plan.group.handle, plan.number % 1000),
    ]
    handles = dist.batch_isend_irecv(operations)
    return handles, lambda: same(received, plan.values((me - 1) % plan.size, plan.count))


def objects(plan: Plan, me: int) -> Started:
    everyone: list[Any] = [None] * plan.size
    dist.all_gather_object(everyone, plan.values(me, plan.count % 100), plan.group.handle)
    expected = [plan.values(member, plan.count % 100) for member in range(plan.size)]
    return [], lambda: all(np.array_equal(a, b) for a, b in zip(everyone, expected, strict=True))


def barrier(plan: Plan, me: int) -> Started:
    return [dist.barrier(plan.group.handle, async_op=True)], lambda: True


KINDS = {
    kind.__name__: kind
    for kind in (
        *(all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, broadcast, all_gather),
        *(all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single, coalesced),
        *(ring, objects, barrier),
    )
}


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; in bytes, over all heaps."""

    _fields_ = [
        *[(f"before{i}", ctypes.c_size_t) for i in range(4)],
        ("mapped", ctypes.c_size_t),  # hblkhd
        *[(f"between{i}", ctypes.c_size_t) for i in range(2)],
        ("in_heaps", ctypes.c_size_t),  # uordblks
        *[(f"after{i}", ctypes.c_size_t) for i in range(2)],
    ]


_libc = ctypes.CDLL(None)
_GLIBC = hasattr(_libc, "mallinfo2")
if _GLIBC:
    _libc.mallinfo2.restype = _Mallinfo
    # Every group has a thread, and every thread its own heap, up to eight for each core: the gaps
    # that random sizes leave in so many look like growth for longer than a soak lasts.
    _M_ARENA_MAX = -8
    _libc.mallopt(_M_ARENA_MAX, 2)


@dataclass
class Memory:
    """Of this process, in MB; `allocated` is 0 where the C library cannot tell."""

    resident: float
    allocated: float

    @staticmethod
    def now() -> "Memory":
        gc.collect()
        allocated = 0.0
        if _GLIBC:
            _libc.malloc_trim(0)
            found = _libc.mallinfo2()
            allocated = (found.in_heaps + found.mapped) / 1e6
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Memory(pages * 4096 / 1e6, allocated)

    def __str__(self) -> str:
        return f"{self.resident:.1f} ({self.allocated:.1f} allocated)"


class Soak:
    """Starts operations, keeps some under way, checks what has ended.

    Operations of one group run in order and every rank goes through the same plan, so whatever a
    rank waits for, the others will come to.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rank = dist.get_rank()
        self.choose = random.Random(seed)
        self.groups = [Group(list(range(dist.get_world_size())), None)]
        self.groups += [self.new_group() for _ in range(GROUPS)]
        self.pending: list[Pending] = []
        self.wrong: list[str] = []
        self.checked = 0

    def new_group(self) -> Group:
        world_size = dist.get_world_size()
        size = self.choose.randint(min(2, world_size), world_size)
        ranks = sorted(self.choose.sample(range(world_size), size))
        return Group(ranks, dist.new_group(ranks))

    def replace_group(self) -> None:
        self.finish()
        leaving = self.groups.pop(self.choose.randrange(1, len(self.groups)))
        if self.rank in leaving.ranks:
            dist.destroy_process_group(leaving.handle)
        self.groups.append(self.new_group())

    def operate(self, number: int) -> None:
        if number % OPERATIONS_PER_GROUP == OPERATIONS_PER_GROUP - 1:
            self.replace_group()
        plan = Plan(self.seed, number, self.groups)
        if self.rank in plan.group.ranks:
            handles, check = KINDS[plan.kind](plan, plan.group.ranks.index(self.rank))
            self.pending.append(Pending(str(plan), handles, check))
        while len(self.pending) > plan.depth:
            self.check(self.pending.pop(plan.choose.randrange(len(self.pending))))

    def finish(self) -> None:
        while self.pending:
            self.check(self.pending.pop())

    def check(self, pending: Pending) -> None:
        for handle in pending.handles:
            handle.wait()
        self.checked += 1
        if not pending.check():
            self.wrong.append(f"rank {self.rank}: {pending.what}")


def soak(operations: int, seed: int, show: bool = False) -> tuple[list[str], list[Memory], int]:
    """What was wrong on this rank, its memory at three times, how many results it checked."""
    run = Soak(seed)
    marks = {operations // 10, operations // 2, operations - 1}
    memory: list[Memory] = []
    for number in tqdm(range(operations), disable=not show or run.rank != 0, mininterval=1.0):
        run.operate(number)
        if number in marks:
            run.finish()
            memory.append(Memory.now())
    for group in run.groups[1:]:
        if run.rank in group.ranks:
            dist.destroy_process_group(group.handle)
    return run.wrong, memory, run.checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth-mb", type=float, default=4.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    with ddp.process_group("mpi") as world:
        wrong, memory, checked = soak(arguments.operations, arguments.seed, show=True)
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, (wrong, memory, checked))
    mistakes = [text for wrong, _, _ in everyone for text in wrong]
    grown = any(
        end.allocated - middle.allocated > arguments.growth_mb
        or end.resident - middle.resident > 4 * arguments.growth_mb
        for _, (_, middle, end), _ in everyone
    )
    if world.rank == 0:
        for text in mistakes[:20]:
            print("wrong:", text)
        print(
            f"{arguments.operations} operations, {world.world_size} ranks, seed {arguments.seed}, "
            f"{time.monotonic() - begin:.0f} s: {sum(c for _, _, c in everyone)} results checked, "
            f"{len(mistakes)} wrong"
        )
        for rank, (_, (start, middle, end), _) in enumerate(everyone):
            print(f"rank {rank}: MB at the start {start}, in the middle {middle}, at the end {end}")
        if grown:
            print("memory grew")
    return int(bool(mistakes) or grown)


if __name__ == "__main__":
    sys.exit(main())
