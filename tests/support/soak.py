"""Random collectives, checked against numpy.

Everything is drawn from one seed, the same on all ranks; each computes with numpy what it must
receive. The groups overlap.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

Op = dist.ReduceOp
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, torch.uint8, *SIGNED, *COMPLEX, torch.bool)
# `Operation.values` are small, so that results are exact whatever the order of the ranks.
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
Array = Any  # of numpy
# The handle or handles, the tensors that are filled, and what must then be in them.
Started = tuple[Any, list[torch.Tensor], list[Array]]


class Group(NamedTuple):
    ranks: list[int]
    handle: Any  # torch's


class Operation:
    """One operation's choices, the same on every rank, which can compute everyone's values."""

    def __init__(self, seed: int, number: int, groups: list[Group], kinds: list[str]) -> None:
        self.seed, self.number = seed, number
        choose = self.choose = random.Random(f"{seed} {number}")
        self.ranks, self.group = choose.choice(groups)
        self.size = len(self.ranks)
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
        self.me = self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else None
        # What every call is given at its end.
        self.on: dict[str, Any] = {"group": self.group, "async_op": True}

    def __str__(self) -> str:
        return (
            f"operation {self.number}, {self.kind} of {self.count} {self.dtype} ({self.op}, root "
            f"{self.root}, strided {self.strided}) on ranks {self.ranks}"
        )

    def _reductions(self) -> list[Any]:
        if self.dtype in COMPLEX:
            return [Op.SUM]
        if self.dtype == torch.bool:
            return [Op.SUM, Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR]
        ordered = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
        return [*ordered, Op.AVG] if self.dtype in FLOATS else list(REDUCTIONS)

    def values(self, member: int, count: int) -> Array:
        draw = np.random.default_rng([self.seed, self.number, self.ranks[member]])
        if self.dtype == torch.bool:
            return draw.integers(0, 2, count).astype(bool)
        low, high = (-3, 4) if self.dtype != torch.uint8 else (0, 4)  # at most 3 to the size
        numbers = draw.integers(low, high, count)
        if self.dtype in COMPLEX:
            numbers = numbers + 1j * draw.integers(low, high, count)
        return numbers.astype(numpy_type(self.dtype))

    def everyones(self, count: int) -> list[Array]:
        return [self.values(member, count) for member in range(self.size)]

    def mine(self, count: int) -> torch.Tensor:
        return self.tensor(self.values(self.me, count))

    def tensor(self, values: Array) -> torch.Tensor:
        """As a tensor of the dtype, every second element of a longer one where that was drawn."""
        tensor = torch.from_numpy(values.copy()).to(self.dtype)
        return torch.stack([tensor, tensor], -1)[:, 0] if self.strided else tensor

    def parts(self, values: Array) -> list[torch.Tensor]:
        return [*map(self.tensor, np.split(values, self.size))]

    def empty(self, *counts: int) -> list[torch.Tensor]:
        return [self.tensor(np.zeros(count, dtype=numpy_type(self.dtype))) for count in counts]

    def reduced(self, count: int) -> Array:
        contributions, kind = self.everyones(count), numpy_type(self.dtype)
        if self.op == Op.AVG:
            return np.asarray(np.add.reduce(contributions) / kind(self.size))
        combine = REDUCTIONS[self.op]
        if self.dtype == torch.bool:  # a sum is "any", a product "all"
            combine = {Op.SUM: np.logical_or, Op.PRODUCT: np.logical_and}.get(self.op, combine)
        return np.asarray(combine.reduce(contributions)).astype(kind)

    def my_part(self, values: Array) -> Array:
        return np.split(values, self.size)[self.me]

    # The kinds.

    def all_reduce(self) -> Started:
        tensor = self.mine(self.count)
        return dist.all_reduce(tensor, self.op, **self.on), [tensor], [self.reduced(self.count)]

    def reduce(self) -> Started:
        tensor = self.mine(self.count)
        handle = dist.reduce(tensor, op=self.op, group_dst=self.root, **self.on)
        at_root = self.me == self.root
        expected = self.reduced(self.count) if at_root else self.values(self.me, self.count)
        return handle, [tensor], [expected]

    def reduce_scatter(self) -> Started:
        *ends, whole = np.cumsum(self.counts)
        parts = [*map(self.tensor, np.split(self.values(self.me, whole), ends))]
        outputs = self.empty(self.counts[self.me])
        handle = dist.reduce_scatter(*outputs, parts, self.op, **self.on)
        return handle, outputs, [np.split(self.reduced(whole), ends)[self.me]]

    def reduce_scatter_tensor(self) -> Started:
        whole, outputs = self.count * self.size, self.empty(self.count)
        handle = dist.reduce_scatter_tensor(*outputs, self.mine(whole), self.op, **self.on)
        return handle, outputs, [self.my_part(self.reduced(whole))]

    def broadcast(self) -> Started:
        tensor = self.mine(self.count)
        handle = dist.broadcast(tensor, group_src=self.root, **self.on)
        return handle, [tensor], [self.values(self.root, self.count)]

    def all_gather(self) -> Started:
        outputs = self.empty(*self.counts)
        handle = dist.all_gather(outputs, self.mine(self.counts[self.me]), **self.on)
        return handle, outputs, [self.values(r, c) for r, c in enumerate(self.counts)]

    def all_gather_into_tensor(self) -> Started:
        outputs = self.empty(self.count * self.size)
        handle = dist.all_gather_into_tensor(*outputs, self.mine(self.count), **self.on)
        return handle, outputs, [np.concatenate(self.everyones(self.count))]

    def gather(self) -> Started:
        at_root = self.me == self.root
        outputs = self.empty(*[self.count] * self.size) if at_root else []
        given = self.mine(self.count), outputs or None
        handle = dist.gather(*given, group_dst=self.root, **self.on)
        return handle, outputs, self.everyones(self.count) if at_root else []

    def scatter(self) -> Started:
        outputs, sent = self.empty(self.count), self.values(self.root, self.count * self.size)
        parts = self.parts(sent) if self.me == self.root else None
        handle = dist.scatter(*outputs, parts, group_src=self.root, **self.on)
        return handle, outputs, [self.my_part(sent)]

    def all_to_all(self) -> Started:
        outputs = self.empty(*self.counts)
        sent = [self.values(r, count * self.size) for r, count in enumerate(self.counts)]
        handle = dist.all_to_all(outputs, self.parts(sent[self.me]), **self.on)
        return handle, outputs, [*map(self.my_part, sent)]

    def all_to_all_single(self) -> Started:
        *ends, whole = np.cumsum(self.counts)  # what each gets from every other
        mine = [self.counts[self.me]] * self.size
        outputs = self.empty(sum(mine))
        handle = dist.all_to_all_single(*outputs, self.mine(whole), mine, self.counts, **self.on)
        received = [np.split(values, ends)[self.me] for values in self.everyones(whole)]
        return handle, outputs, [np.concatenate(received)]

    def ring(self) -> Started:
        before, after = ((self.me + step) % self.size for step in (-1, 1))
        outputs, tag = self.empty(self.count), self.number % 1000
        sends = dist.P2POp(dist.isend, self.mine(self.count), None, self.group, tag, after)
        receives = dist.P2POp(dist.irecv, *outputs, None, self.group, tag, before)
        handles = dist.batch_isend_irecv([sends, receives])
        return handles, outputs, [self.values(before, self.count)]

    def barrier(self) -> Started:
        return dist.barrier(**self.on), [], []


def numpy_type(dtype: torch.dtype) -> Any:
    narrow = dtype in FLOATS and dtype.itemsize == 2
    return torch.empty(0, dtype=torch.float32 if narrow else dtype).numpy().dtype.type


KINDS = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all"),
    *("all_to_all_single", "ring", "barrier"),
)


def soak(operations: int, seed: int, kinds: list[str]) -> int:
    """How many results this rank has checked."""
    world_size, choose = dist.get_world_size(), random.Random(seed)
    pending: list[tuple[Operation, Started]] = []
    checked = 0

    def new_group() -> Group:
        size = choose.randint(min(2, world_size), world_size)
        ranks = sorted(choose.sample(range(world_size), size))
        return Group(ranks, dist.new_group(ranks))

    def check_until(left: int, which: Callable[[int], int] = lambda count: 0) -> None:
        nonlocal checked
        while len(pending) > left:
            operation, (handles, tensors, expected) = pending.pop(which(len(pending)))
            for handle in handles if isinstance(handles, list) else [handles]:
                handle.wait()
            checked += 1
            pairs = zip(tensors, expected, strict=True)
            right = all(t.equal(torch.from_numpy(e.copy()).to(t.dtype)) for t, e in pairs)
            assert right, operation

    groups = [Group([*range(world_size)], None), *(new_group() for _ in range(GROUPS))]
    for number in range(operations):
        operation = Operation(seed, number, groups, kinds)
        if operation.me is not None:
            pending.append((operation, getattr(operation, operation.kind)()))
        check_until(operation.depth, operation.choose.randrange)
    check_until(0)
    return checked
