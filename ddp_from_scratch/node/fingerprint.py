r"""Fingerprints: a call and its place in a fixed number of bytes, for ranks to compare.

all_reduce(SUM) of 10 x torch.float32\nwindow 3 at 4096\0 ......
operation                             place               padding
"""

import threading
import zlib
from collections.abc import Sequence
from functools import lru_cache

NBYTES = 256


class _Caller(threading.local):
    """For whom this thread starts collectives: ` for bucket 0 of Reducer 2`; mostly empty."""

    suffix = ""


caller = _Caller()


@lru_cache(maxsize=256)
def encode(operation: str, place: str) -> bytes:
    """At most `NBYTES` bytes; long operations keep their beginning and a checksum."""
    # The zero ends it, so that no fingerprint is the beginning of another.
    encoded = f"{operation}\n{place}\0".encode()
    if len(encoded) > NBYTES:  # lists of many sizes
        short = f"{operation[:150]}... (checksum {zlib.crc32(operation.encode()):08x})"
        encoded = f"{short}\n{place[:50]}\0".encode()
    return encoded


def mark_place(encoded: memoryview) -> None:
    """Replaces the place by one that no rank gives."""
    encoded[bytes(encoded).index(b"\n") + 1] = ord("*")


def operation_in(encoded: bytes) -> str:
    """The operation, without the place."""
    return encoded.partition(b"\n")[0].decode()


def split(joined: bytes) -> list[bytes]:
    """Fingerprints that lie one behind the other."""
    return [joined[i : i + NBYTES] for i in range(0, len(joined), NBYTES)]


def describe_difference(here: Sequence[tuple[int, str]], elsewhere: Sequence[str]) -> str:
    """`rank 0 broadcast(...); ranks 1, 2 all_reduce(...)`, and operations of other machines."""
    operations = dict.fromkeys(operation for _, operation in here)
    lines = [
        f"{name_ranks([rank for rank, called in here if called == operation])} {operation}"
        for operation in operations
    ]
    others = [operation for operation in dict.fromkeys(elsewhere) if operation not in operations]
    return "; ".join(lines + [f"another machine's ranks {operation}" for operation in others])


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 1, 2`; empty for none."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
