"""Random collectives, checked against numpy, for as long as you like.

    mpirun -n 4 python -m tests.support.soak --operations 20000 --seed 1

Kinds, shapes, dtypes, reductions, roots, groups and the number of operations under way at once are
drawn from one seed, the same on all ranks; each rank computes with numpy what it must receive.
Every few hundred operations one of the groups, which overlap, makes way for another.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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
Array = Any  # of numpy


@dataclass
class Group:
    """A process group and the ranks in it; `handle` is torch's."""

    ranks: list[int]
    handle: Any


class Plan:
    """The random choices of one operation, the same on every rank.

    Rank r's values come from (seed, operation, r), so that any rank can compute everyone's.
    """

    def __init__(self, seed: int, number: int, groups: list[Group], kinds: list[str]) -> None:
        self.seed, self.number = seed, number
        choose = self.choose = random.Random(f"{seed} {number}")
        self.group = choose.choice(groups)
        self.size = len(self.group.ranks)
        self.kind = choose.choice(kinds)
        self.dtype = choose.choice(DTYPES)
        self.op = choose.choice(self._reductions())
        self.root = choose.randrange(self.size)
        # Mostly small, now and then a megabyte; sometimes no element at all.
        largest = choose.choice((1, 8, 100, 1000, 1000, 10_000, 100_000))
        self.count = choose.randrange(largest + 1)
        self.counts = [choose.randrange(self.count + 1) for _ in range(self.size)]
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

    def values(self, member: int, count: int) -> Array:
        """What the group's `member` contributes: 16-bit floats as float32."""
        draw = np.random.default_rng([self.seed, self.number, self.group.ranks[member]])
        if self.dtype == torch.bool:
            return draw.integers(0, 2, count).astype(bool)
        low, high = (-3, 4) if self.dtype != torch.uint8 else (0, 4)  # at most 3 to the size
        numbers = draw.integers(low, high, count)
        if self.dtype in COMPLEX:
            numbers = numbers + 1j * draw.integers(low, high, count)
        return numbers.astype(numpy_type(self.dtype))

    def mine(self, member: int) -> torch.Tensor:
        return self.tensor(self.values(member, self.count))

    def everyones(self, count: int) -> list[Array]:
        return [self.values(member, count) for member in range(self.size)]

    def tensor(self, values: Array) -> torch.Tensor:
        """As a tensor of the dtype, every second element of a longer one where that was drawn."""
        tensor = torch.from_numpy(values.copy()).to(self.dtype)
        return torch.stack([tensor, tensor], -1)[:, 0] if self.strided else tensor

    def empty(self, count: int) -> torch.Tensor:
        return self.tensor(np.zeros(count, dtype=numpy_type(self.dtype)))

    def reduced(self, count: int) -> Array:
        contributions, kind = self.everyones(count), numpy_type(self.dtype)
        if self.op == Op.AVG:
            return np.asarray(np.add.reduce(contributions) / kind(self.size))
        combine = REDUCTIONS[self.op]
        if self.dtype == torch.bool:  # a sum is "any", a product "all"
            combine = {Op.SUM: np.logical_or, Op.PRODUCT: np.logical_and}.get(self.op, combine)
        return np.asarray(combine.reduce(contributions)).astype(kind)


def numpy_type(dtype: torch.dtype) -> Any:
    narrow = dtype in FLOATS and dtype.itemsize == 2
    return torch.empty(0, dtype=torch.float32 if narrow else dtype).numpy().dtype.type


# Each kind starts its operation on member `me`, with `root` as torch counts ranks: the handle or
# handles, the tensors that it fills, and a function that returns what must then be in them.

Started = tuple[Any, list[torch.Tensor], Callable[[], list[Array]]]


def all_reduce(plan: Plan, me: int, group: Any, root: int) -> Started:
    tensor = plan.mine(me)
    handle = dist.all_reduce(tensor, plan.op, group, async_op=True)
    return handle, [tensor], lambda: [plan.reduced(plan.count)]


def coalesced(plan: Plan, me: int, group: Any, root: int) -> Started:
    tensors = [plan.mine(me) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as handle:
        for tensor in tensors:
            dist.all_reduce(tensor, plan.op, group)
    return handle, tensors, lambda: [plan.reduced(plan.count)] * 3


def reduce(plan: Plan, me: int, group: Any, root: int) -> Started:
    tensor = plan.mine(me)
    handle = dist.reduce(tensor, root, plan.op, group, async_op=True)
    of_all = plan.reduced if me == plan.root else partial(plan.values, me)
    return handle, [tensor], lambda: [of_all(plan.count)]


def reduce_scatter(plan: Plan, me: int, group: Any, root: int) -> Started:
    ends = np.cumsum(plan.counts)
    parts = np.split(plan.values(me, ends[-1]), ends[:-1])
    output = plan.empty(plan.counts[me])
    handle = dist.reduce_scatter(output, [*map(plan.tensor, parts)], plan.op, group, async_op=True)
    return handle, [output], lambda: [np.split(plan.reduced(ends[-1]), ends[:-1])[me]]


def reduce_scatter_tensor(plan: Plan, me: int, group: Any, root: int) -> Started:
    whole, output = plan.count * plan.size, plan.empty(plan.count)
    given = plan.tensor(plan.values(me, whole))
    handle = dist.reduce_scatter_tensor(output, given, plan.op, group, async_op=True)
    return handle, [output], lambda: [np.split(plan.reduced(whole), plan.size)[me]]


def broadcast(plan: Plan, me: int, group: Any, root: int) -> Started:
    tensor = plan.mine(me)
    handle = dist.broadcast(tensor, root, group, async_op=True)
    return handle, [tensor], lambda: [plan.values(plan.root, plan.count)]


def all_gather(plan: Plan, me: int, group: Any, root: int) -> Started:
    outputs = [plan.empty(count) for count in plan.counts]
    tensor = plan.tensor(plan.values(me, plan.counts[me]))
    handle = dist.all_gather(outputs, tensor, group, async_op=True)
    return handle, outputs, lambda: [plan.values(r, c) for r, c in enumerate(plan.counts)]


def all_gather_into_tensor(plan: Plan, me: int, group: Any, root: int) -> Started:
    output = plan.empty(plan.count * plan.size)
    handle = dist.all_gather_into_tensor(output, plan.mine(me), group, async_op=True)
    return handle, [output], lambda: [np.concatenate(plan.everyones(plan.count))]


def gather(plan: Plan, me: int, group: Any, root: int) -> Started:
    outputs = [plan.empty(plan.count) for _ in range(plan.size)] if me == plan.root else []
    handle = dist.gather(plan.mine(me), outputs or None, root, group, async_op=True)
    return handle, outputs, lambda: plan.everyones(plan.count) if outputs else []


def scatter(plan: Plan, me: int, group: Any, root: int) -> Started:
    output = plan.empty(plan.count)
    sent = np.split(plan.values(plan.root, plan.count * plan.size), plan.size)
    parts = [*map(plan.tensor, sent)] if me == plan.root else None
    handle = dist.scatter(output, parts, root, group, async_op=True)
    return handle, [output], lambda: [sent[me]]


def all_to_all(plan: Plan, me: int, group: Any, root: int) -> Started:
    sent = [np.split(plan.values(r, c * plan.size), plan.size) for r, c in enumerate(plan.counts)]
    outputs = [plan.empty(count) for count in plan.counts]
    handle = dist.all_to_all(outputs, [*map(plan.tensor, sent[me])], group, async_op=True)
    return handle, outputs, lambda: [parts[me] for parts in sent]


def all_to_all_single(plan: Plan, me: int, group: Any, root: int) -> Started:
    counts, ends = plan.counts, np.cumsum(plan.counts)  # what each gets from every other
    output, given = plan.empty(counts[me] * plan.size), plan.tensor(plan.values(me, ends[-1]))
    mine = [counts[me]] * plan.size
    handle = dist.all_to_all_single(output, given, mine, counts, group, async_op=True)

    def expected() -> list[Array]:
        return [np.concatenate([np.split(v, ends[:-1])[me] for v in plan.everyones(ends[-1])])]

    return handle, [output], expected


def ring(plan: Plan, me: int, group: Any, root: int) -> Started:
    """A message to the next member, with a tag, and one from the member before."""
    before, after = (plan.group.ranks[(me + step) % plan.size] for step in (-1, 1))
    received, tag = plan.empty(plan.count), plan.number % 1000
    operations = [
        dist.P2POp(dist.isend, plan.mine(me), after, group, tag),
        dist.P2POp(dist.irecv, received, before, group, tag),
    ]
    handles = dist.batch_isend_irecv(operations)
    return handles, [received], lambda: [plan.values((me - 1) % plan.size, plan.count)]


def objects(plan: Plan, me: int, group: Any, root: int) -> Started:
    everyone: list[Any] = [None] * plan.size
    dist.all_gather_object(everyone, plan.values(me, plan.count % 100), group)
    return [], [*map(torch.from_numpy, everyone)], lambda: plan.everyones(plan.count % 100)


def barrier(plan: Plan, me: int, group: Any, root: int) -> Started:
    return dist.barrier(group, async_op=True), [], list


KINDS = {
    kind.__name__: kind
    for kind in (
        *(all_reduce, coalesced, reduce, reduce_scatter, reduce_scatter_tensor, broadcast),
        *(all_gather, all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single),
        *(ring, objects, barrier),
    )
}


def soak(operations: int, seed: int, kinds: list[str] | None = None) -> tuple[list[str], int]:
    """What was wrong on this rank, and how many results it checked.

    Operations of one group run in order and every rank goes through the same plan, so whatever a
    rank waits for, the others will come to.
    """
    rank, world_size, choose = dist.get_rank(), dist.get_world_size(), random.Random(seed)
    pending: list[tuple[str, Started]] = []
    wrong: list[str] = []
    checked = 0

    def new_group() -> Group:
        size = choose.randint(min(2, world_size), world_size)
        ranks = sorted(choose.sample(range(world_size), size))
        return Group(ranks, dist.new_group(ranks))

    def close(group: Group) -> None:
        if rank in group.ranks:
            dist.destroy_process_group(group.handle)

    def check_until(left: int, which: Callable[[int], int] = lambda count: 0) -> None:
        nonlocal checked
        while len(pending) > left:
            what, (handles, tensors, expected) = pending.pop(which(len(pending)))
            for handle in handles if isinstance(handles, list) else [handles]:
                handle.wait()
            checked += 1
            pairs = zip(tensors, expected(), strict=True)
            if not all(t.equal(torch.from_numpy(e.copy()).to(t.dtype)) for t, e in pairs):
                wrong.append(f"rank {rank}: {what}")

    groups = [Group(list(range(world_size)), None), *(new_group() for _ in range(GROUPS))]
    for number in range(operations):
        if number % OPERATIONS_PER_GROUP == OPERATIONS_PER_GROUP - 1:
            check_until(0)
            close(groups.pop(choose.randrange(1, len(groups))))
            groups.append(new_group())
        plan = Plan(seed, number, groups, kinds or sorted(KINDS))
        ranks = plan.group.ranks
        if rank in ranks:
            root, start = ranks[plan.root], KINDS[plan.kind]
            started = start(plan, ranks.index(rank), plan.group.handle, root)
            pending.append((str(plan), started))
        check_until(plan.depth, plan.choose.randrange)
    check_until(0)
    for group in groups[1:]:
        close(group)
    return wrong, checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ddp.process_group("mpi") as world:
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, soak(options.operations, options.seed))
    if world.rank == 0:
        for rank, (wrong, checked) in enumerate(everyone):
            print(
                f"rank {rank}: {checked} results checked, {len(wrong)} wrong", *wrong[:20], sep="\n"
            )
    return int(any(wrong for wrong, _ in everyone))


if __name__ == "__main__":
    sys.exit(main())
