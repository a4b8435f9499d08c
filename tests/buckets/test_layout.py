"""Which gradient lies in which bucket: arithmetic, with numbers to be checked in the head."""

import math
import random
import re

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.layout import BucketLayout, Gradient, assign_buckets, bucket_caps

MB = 2**20


def gradients(*sizes: int, keys: str = "") -> list[Gradient]:
    """Gradients of 4-byte elements, sizes in bytes; `keys` holds one letter for each."""
    keys = keys or "f" * len(sizes)
    return [Gradient(size // 4, size, key) for size, key in zip(sizes, keys, strict=True)]


def members(layouts: list[BucketLayout]) -> list[tuple[int, ...]]:
    return [layout.members for layout in layouts]


@pytest.mark.parametrize(
    ("bucket_cap_mb", "caps"),
    [
        (None, (1 * MB, 25 * MB)),
        (0, (0,)),
        (2, (2 * MB,)),
        (0.5, (MB // 2,)),
        (math.inf, (2**62,)),
        ([1, 2, 0.5], (MB, 2 * MB, MB // 2)),
    ],
)
def test_caps(bucket_cap_mb, caps):
    assert bucket_caps(bucket_cap_mb) == caps


@pytest.mark.parametrize("bucket_cap_mb", [-1, -0.5, -math.inf, math.nan, [], [1, -1]])
def test_caps_refuses_what_is_no_size(bucket_cap_mb):
    named = re.escape(f"bucket_cap_mb must be 0 or more, got {bucket_cap_mb}")
    with pytest.raises(ValueError, match=named):
        bucket_caps(bucket_cap_mb)


def test_bucket_is_closed_when_its_size_reaches_the_cap():
    assert members(assign_buckets(gradients(4, 4, 4, 4), range(4), [8, 8])) == [(0, 1), (2, 3)]
    assert members(assign_buckets(gradients(4, 4, 4, 4), range(4), [9, 9])) == [(0, 1, 2), (3,)]


def test_first_bucket_has_its_own_cap():
    assert members(assign_buckets(gradients(4, 4, 4, 4), range(4), [4, 8])) == [(0,), (1, 2), (3,)]


def test_each_bucket_may_have_a_cap_and_the_last_one_holds_for_the_rest():
    layouts = assign_buckets(gradients(4, 4, 4, 4, 4, 4, 4), range(7), [4, 12, 8])
    assert members(layouts) == [(0,), (1, 2, 3), (4, 5), (6,)]


def test_gradients_lie_in_the_given_order():
    assert members(assign_buckets(gradients(4, 4, 4), [2, 0, 1], [8, 8])) == [(2, 0), (1,)]


def test_offsets_are_in_elements_and_without_gaps():
    (layout,) = assign_buckets(gradients(40, 8, 12), [1, 0, 2], [100, 100])
    assert layout == BucketLayout(members=(1, 0, 2), offsets=(0, 2, 12), numel=15)


def test_no_gradient_is_split():
    assert members(assign_buckets(gradients(4, 1000, 4), range(3), [8, 8])) == [(0, 1), (2,)]


def test_gradients_of_different_keys_do_not_share_a_bucket():
    layouts = assign_buckets(gradients(4, 4, 4, 4, keys="fhfh"), range(4), [8, 8])
    assert members(layouts) == [(0, 2), (1, 3)]


def test_each_key_has_a_first_bucket():
    layouts = assign_buckets(gradients(4, 4, 4, 4, 4, 4, keys="fhfhfh"), range(6), [4, 8])
    assert members(layouts) == [(0,), (1,), (2, 4), (3, 5)]


def test_buckets_come_in_the_order_in_which_they_are_full():
    """Bucket h is begun first, but its last gradient is ready after f's."""
    layouts = assign_buckets(gradients(4, 4, 4, 4, keys="hffh"), range(4), [100, 100])
    assert members(layouts) == [(1, 2), (0, 3)]


def test_a_bucket_that_never_reaches_its_cap_is_full_with_its_last_gradient():
    layouts = assign_buckets(gradients(4, 4, 8, 8, keys="hfff"), range(4), [8, 8])
    assert members(layouts) == [(0,), (1, 2), (3,)]


def test_cap_zero_puts_every_gradient_into_a_bucket_of_its_own():
    layouts = assign_buckets(gradients(4, 0, 400), range(3), bucket_caps(0))
    assert members(layouts) == [(0,), (1,), (2,)]


def test_cap_inf_puts_all_gradients_of_a_key_into_one_bucket():
    huge = gradients(2**50, 2**50, 2**50, keys="ffh")
    assert members(assign_buckets(huge, range(3), bucket_caps(math.inf))) == [(0, 1), (2,)]


def test_no_gradients_make_no_buckets():
    assert assign_buckets([], [], [8, 8]) == []


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], []])
def test_order_must_hold_each_gradient_once(order):
    with pytest.raises(ValueError, match="each of the 3 gradients exactly once, got"):
        assign_buckets(gradients(4, 4, 4), order, [8, 8])


def test_a_bucket_is_never_empty():
    with pytest.raises(ValueError, match="got 0 members and 0 offsets"):
        BucketLayout((), (), 0)


@pytest.mark.parametrize("seed", range(50))
def test_as_torch_assigns_them(seed):
    """torch's own function, in the form that its rebuild uses: buckets in the order given."""
    draw = random.Random(seed)
    sizes = [4 * draw.randrange(100) for _ in range(draw.randrange(1, 40))]
    order = draw.sample(range(len(sizes)), len(sizes))
    caps = [draw.randrange(1, 300 + 300 * k) for k in range(draw.randrange(1, 5))]
    tensors = [torch.empty(sizes[index] // 4) for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [], order)
    assert members(assign_buckets(gradients(*sizes), order, caps)) == [
        tuple(bucket) for bucket in theirs
    ]
