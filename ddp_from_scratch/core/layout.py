"""The layout of gradients in buckets: arithmetic, without tensors or communication.

A bucket is one flat buffer, and no gradient is split:

    bucket 0   |<-- fc2.bias -->|<------------ fc2.weight ------------>|
    offset     0                10                                     1290
    bucket 1   |<-- fc1.bias -->|<------------ fc1.weight ---- ... --->|

The rule is that of torch's DDP (`compute_bucket_assignment_by_size` in
torch/csrc/distributed/c10d/reducer.cpp): gradients of one dtype on one device share a bucket; a
bucket is closed as soon as its size reaches the cap.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Literal, TypeAlias

# As in torch's DDP. The first bucket is small, so that the first all-reduce starts early.
FIRST_BUCKET_CAP_MB = 1.0
BUCKET_CAP_MB = 25.0

AUTO: Final = "auto"
Caps: TypeAlias = float | Sequence[float] | Literal["auto"] | None


def bucket_caps(bucket_cap_mb: Caps) -> tuple[int, ...]:
    """Converts `bucket_cap_mb` to caps in bytes; the last one applies to all later buckets.

    0 MiB gives every gradient its own bucket, `inf` puts all into one. A sequence gives the first
    bucket's cap, the second's, and so on. None means 1 MiB and then 25 MiB, as in torch's DDP;
    "auto" begins with these. Raises a ValueError if a cap is negative or no number, or none given.
    """
    sizes: float | Sequence[float]
    if bucket_cap_mb is None or bucket_cap_mb == AUTO:
        sizes = (FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB)
    else:
        sizes = bucket_cap_mb
    if isinstance(sizes, str):
        raise ValueError(f'bucket_cap_mb must be a number, numbers or "auto", got {sizes!r}')
    caps = sizes if isinstance(sizes, Sequence) else (sizes,)
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
