"""Which gradient lies in which bucket: arithmetic, with numbers to be checked in the head."""

import math
import random
import re

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.core.layout import assign, bucket_caps

MB = 2**20


def test_caps():
    for bucket_cap_mb, caps in (
        (None, (1 * MB, 25 * MB)),
        ("auto", (1 * MB, 25 * MB)),
        (0, (0,)),
        (0.5, (MB // 2,)),
        (math.inf, (2**62,)),
        ([1, 2, 0.5], (MB, 2 * MB, MB // 2)),
    ):
        assert bucket_caps(bucket_cap_mb) == caps
    for none in (-1, -0.5, -math.inf, math.nan, [], [1, -1]):
        with pytest.raises(ValueError, match=re.escape(f"must be 0 or more, got {none}")):
            bucket_caps(none)


HUGE = (2**50,) * 3
# Bytes of each float32 gradient, a letter of its key, the order of readiness, caps, and members.
LAYOUTS = {
    "keys share no bucket": ((4,) * 4, "fhfh", None, [8], [(0, 2), (1, 3)]),
    "a first bucket for each key": (
        *((4,) * 6, "fhfhfh", None, [4, 8], [(0,), (1,), (2, 4), (3, 5)]),
    ),
    "in the order in which they are full": ((4,) * 4, "hffh", None, [100], [(1, 2), (0, 3)]),
    "below its cap full with its last": ((4, 4, 8, 8), "hfff", None, [8], [(0,), (1, 2), (3,)]),
    "cap 0": ((4, 0, 400), "fff", None, bucket_caps(0), [(0,), (1,), (2,)]),
    "cap inf": (HUGE, "ffh", None, bucket_caps(math.inf), [(0, 1), (2,)]),
    "nothing": ((), "", None, [8], []),
}


@pytest.mark.parametrize(
    ("sizes", "keys", "order", "caps", "expected"), LAYOUTS.values(), ids=LAYOUTS
)
def test_members(sizes, keys, order, caps, expected):
    gradients = list(zip(sizes, keys, strict=True))
    assert assign(gradients, range(len(sizes)) if order is None else order, caps) == expected


def test_what_is_no_layout_is_refused():
    for order in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], []):
        with pytest.raises(ValueError, match="each of the 3 gradients exactly once, got"):
            assign([(4, "f")] * 3, order, [8])


def test_as_torch_assigns_them():
    for seed in range(50):
        draw = random.Random(seed)
        sizes = [4 * draw.randrange(100) for _ in range(draw.randrange(1, 40))]
        order = draw.sample(range(len(sizes)), len(sizes))
        caps = [draw.randrange(1, 300 + 300 * k) for k in range(draw.randrange(1, 5))]
        tensors = [torch.empty(sizes[index] // 4) for index in order]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [], order)
        ours = assign([(size, "f") for size in sizes], order, caps)
        assert [list(members) for members in ours] == theirs
