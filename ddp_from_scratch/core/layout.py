"""The layout of gradients in buckets, and the memory of these buckets.

A bucket is one flat buffer, and no gradient is split:

    bucket 0   |<-- fc2.bias -->|<------------ fc2.weight ------------>|
    offset     0                10                                     1290
    bucket 1   |<-- fc1.bias -->|<------------ fc1.weight ---- ... --->|

The rule is that of torch's DDP (`compute_bucket_assignment_by_size` in
torch/csrc/distributed/c10d/reducer.cpp): gradients of one dtype on one device share a bucket; a
bucket is closed as soon as its size reaches the cap.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.common.memory import dense_strides, grad_dtype, zeros
from ddp_from_scratch.core.bucket import Bucket, FlatBucket
from ddp_from_scratch.core.view_bucket import ViewBucket

# As in torch's DDP. The first bucket is small, so that the first all-reduce starts early.
FIRST_BUCKET_CAP_MB = 1.0
BUCKET_CAP_MB = 25.0

# Elements. Buckets begin at multiples of it: cache lines, aligned for every CPU's vector units.
ALIGNMENT = 64

Caps: TypeAlias = float | Sequence[float] | None


def bucket_caps(bucket_cap_mb: Caps) -> tuple[int, ...]:
    """Converts `bucket_cap_mb` to caps in bytes; the last one applies to all later buckets.

    0 MiB gives every gradient its own bucket, `inf` puts all into one. A sequence gives the first
    bucket's cap, the second's, and so on. None means 1 MiB and then 25 MiB, as in torch's DDP. A
    ValueError if a cap is negative or no number, or none is given.
    """
    if isinstance(bucket_cap_mb, str):
        raise ValueError(f"bucket_cap_mb must be a number or a list, got {bucket_cap_mb!r}")
    if bucket_cap_mb is None:
        bucket_cap_mb = (FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB)
    caps = bucket_cap_mb if isinstance(bucket_cap_mb, Sequence) else (bucket_cap_mb,)
    if not caps or not all(cap >= 0 for cap in caps):
        raise ValueError(f"bucket_cap_mb must be 0 or more, got {bucket_cap_mb}")
    # `inf` cannot be converted to an int; no model has 2**62 bytes.
    return tuple(int(min(cap * 2**20, 2**62)) for cap in caps)


def assign(
    gradients: Sequence[tuple[int, Hashable]], order: Iterable[int], caps: Sequence[int]
) -> list[tuple[int, ...]]:
    """Distributes gradients over buckets, in the order in which they become ready.

    Returns the members of each bucket, in buffer order. Buckets come in the order of filling up.

    Args:
        gradients: the size in bytes and the key of each; gradients of one key may share a bucket.
        order: every index once, the first ready gradient first.
        caps: size in bytes at which the first bucket of each key is closed, the second, and so on;
            the last one applies to all later buckets.
    """
    order = list(order)
    if sorted(order) != list(range(len(gradients))):
        raise ValueError(
            f"order must hold each of the {len(gradients)} gradients exactly once, got {order}"
        )
    open_members: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}
    filled: list[list[int]] = []
    for index in order:
        nbytes, key = gradients[index]
        open_members.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + nbytes
        if open_bytes[key] >= caps[min(closed.get(key, 0), len(caps) - 1)]:
            filled.append(open_members.pop(key))
            open_bytes[key] = 0
            closed[key] = closed.get(key, 0) + 1
    # A bucket is full when its last member is ready: sorts by the turns of the last members.
    turn = {index: position for position, index in enumerate(order)}
    filled.extend(open_members.values())
    filled.sort(key=lambda members: turn[members[-1]])
    return [tuple(members) for members in filled]


class Layout:
    """The parameters of a Reducer, and the memory of their buckets.

    `separate` holds, by name, functions that make a separate bucket for a parameter. The ranks of
    `memory_of`, if given, may share the memory: construction is collective if its backend offers
    that. `owner` is the Reducer's name in errors about buckets.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        separate: Mapping[str, Callable[..., Bucket]],
        memory_of: dist.ProcessGroup | None,
        owner: str,
    ) -> None:
        self._separate, self._owner = separate, owner
        # Parameters in buckets of their own come last: indices below `_in_flat` are in flat ones.
        self.names: list[str] = sorted(parameters, key=lambda name: name in separate)
        self.parameters: list[torch.nn.Parameter] = [parameters[name] for name in self.names]
        self.index_of: dict[str, int] = {name: index for index, name in enumerate(self.names)}
        self._in_flat = len(self.names) - len(separate)
        flat = self.parameters[: self._in_flat]
        keys = [(grad_dtype(p), p.device) for p in flat]
        self._gradients = [
            (p.numel() * key[0].itemsize, key) for p, key in zip(flat, keys, strict=True)
        ]
        # Fixed now, while the strides are the same on all ranks. A rank may transpose a parameter
        # later, and its bucket must still match the others'.
        self._strides = [dense_strides(parameter) for parameter in flat]
        sizes = dict.fromkeys((key for _, key in self._gradients), 0)
        for parameter, (_, key) in zip(flat, self._gradients, strict=True):
            # ALIGNMENT more for each, because every gradient may be a bucket of its own.
            sizes[key] += parameter.numel() + ALIGNMENT
        # Allocated once for any layout, since allocating shared memory is collective.
        self._memory = {key: zeros(size, *key, memory_of) for key, size in sizes.items()}

    def plan(self, order: Sequence[str], caps: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the members of each bucket; the separate ones come last."""
        indices = [*map(self.index_of.__getitem__, order)]
        separate = zip(filter(self._in_flat.__le__, indices), strict=True)
        return [*assign(self._gradients, filter(self._in_flat.__gt__, indices), caps), *separate]

    def make(
        self,
        plan: Sequence[tuple[int, ...]],
        kind: type[FlatBucket],
        old: Sequence[ViewBucket],
        process_group: dist.ProcessGroup | None,
    ) -> tuple[list[FlatBucket], list[Bucket]]:
        """Makes flat buckets of this kind, one behind the other in memory, and separate ones.

        They have the memory of the `old` ones, whose gradients move.
        """
        saved = dict[int, torch.Tensor]()
        for bucket in old:
            saved |= bucket.snapshot()
        flat = [members for members in plan if members[0] < self._in_flat]
        ends, buckets = dict.fromkeys(self._memory, 0), list[FlatBucket]()
        for index, members in enumerate(flat):
            parameters = [self.parameters[member] for member in members]
            _, key = self._gradients[members[0]]
            numel = sum(parameter.numel() for parameter in parameters)
            buffer = self._memory[key][ends[key] : ends[key] + numel]
            ends[key] += -(-numel // ALIGNMENT) * ALIGNMENT
            strides = [self._strides[member] for member in members]
            name, is_last = f"bucket {index} of {self._owner}", index == len(flat) - 1
            label = f"ddp.bucket {index} ({shortened([self.names[m] for m in members], 3)})"
            buckets.append(kind(members, parameters, buffer, strides, index, is_last, name, label))
        views = [bucket for bucket in buckets if isinstance(bucket, ViewBucket)]
        windows = dict[int, str]()
        for new in views:
            windows |= new.window_names(self.names)
            new.know_windows(windows)
            new.restore(saved)
        separate = []
        for index, (member,) in enumerate(plan[len(flat) :], len(flat)):
            name, parameter = self.names[member], self.parameters[member]
            separate.append(self._separate[name](member, parameter, index, process_group, name))
        return buckets, separate
