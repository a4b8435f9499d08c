"""Where gradients lie, and what a hook sees, with a fake one for the other ranks."""

import math
import mmap
import random
import re
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch.common import memory
from ddp_from_scratch.common.memory import same_memory
from ddp_from_scratch.core.bucket import AveragePlan, FlatBucket
from ddp_from_scratch.core.layout import assign, bucket_caps
from ddp_from_scratch.core.view_bucket import ViewBucket


def doubled(state: object, bucket: FlatBucket) -> torch.futures.Future:
    """A comm hook whose result is twice what was sent, in other memory."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def make(*parameters: nn.Parameter, as_view: bool = True) -> FlatBucket:
    return (ViewBucket if as_view else FlatBucket)(range(len(parameters)), parameters)


def average(bucket: FlatBucket, hook, state=None) -> None:
    plan = AveragePlan(hook, state)
    bucket.pack(plan)
    bucket.launch(plan)
    bucket.wait()
    bucket.unpack()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


LAYOUTS = {
    "contiguous": torch.zeros(2, 3, 2, 2),
    "channels-last": torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "transposed": torch.zeros(3, 2).t(),
    "with holes": torch.zeros(100).as_strided((2, 3), (10, 2)),
    "odd stride of a dimension of size 1": torch.zeros(100).as_strided((3, 1), (1, 7)),
    "0-dim": torch.zeros(()),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_views_lie_in_the_buffer_with_the_strides_of_a_dense_parameter(name):
    """So autograd, which lays a gradient out as its parameter, accumulates without transposing."""
    p = nn.Parameter(LAYOUTS[name].clone(memory_format=torch.preserve_format))
    p.data = LAYOUTS[name]
    bucket = make(parameter(1), p, parameter(1))
    view = bucket.views[1]
    assert view.shape == p.shape
    if name in ("contiguous", "channels-last", "transposed"):
        assert view.stride() == p.stride()
    elif name == "with holes":
        assert view.is_contiguous()
    view.fill_(1)
    assert bucket.buffer().tolist() == [0] + [1] * p.numel() + [0]


@pytest.mark.parametrize("small", [0, 2**15], ids=["large", "small"])
def test_gradients_are_copied_once_alone_or_together_and_never_again(monkeypatch, small):
    """Alone as each arrives, or small ones together; no more once `.grad` lies in the bucket."""
    monkeypatch.setattr("ddp_from_scratch.core.bucket._SMALL", small)
    p = parameter(2)
    bucket = make(p)
    p.backward(torch.tensor([2.0, 3.0]))
    assert bucket.packs_early is not bool(small)
    if not small:
        bucket.pack_one(0, AveragePlan(doubled, scale=0.5))
    assert p.grad.tolist() == [2, 3] if small else p.grad is None
    assert small or bucket.buffer().tolist() == [1, 1.5]
    average(bucket, doubled)
    assert p.grad.tolist() == ([4, 6] if small else [2, 3])
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    p.grad.zero_()
    p.backward(torch.tensor([1.0, 5.0]))
    assert same_memory(p.grad, bucket.views[0])  # autograd accumulated in place
    average(bucket, doubled)
    assert p.grad.tolist() == [2, 10]


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
def test_a_hook_sees_gradients_and_parameters_and_may_replace_the_buffer(as_view):
    weight, bias = parameter(2, 2), parameter(3)
    bucket = make(weight, bias, as_view=as_view)
    seen = []

    def hook(state, bucket):
        assert (state, bucket.index(), bucket.is_last()) == ("state", 0, True)
        assert list(map(id, bucket.parameters())) == [id(weight), id(bias)]
        seen.extend(gradient.tolist() for gradient in bucket.gradients())
        bucket.gradients()[1].fill_(7)
        assert bucket.buffer().tolist() == [0, 1, 2, 3, 7, 7, 7]
        assert bucket.buffer().dtype == torch.float32  # that of the last pass is gone
        bucket.set_buffer(bucket.buffer().half())
        return doubled(state, bucket)

    for _ in range(2):
        weight.grad = bias.grad = None
        weight.backward(torch.arange(4.0).view(2, 2))
        bias.backward(torch.arange(10.0, 13.0))
        average(bucket, hook, "state")
        assert bias.grad.tolist() == [14, 14, 14]
        assert bias.grad.dtype == torch.float32
    assert seen == [[[0, 1], [2, 3]], [10, 11, 12]] * 2
    with pytest.raises(ValueError, match="must have 7, got 3"):
        bucket.set_buffer(torch.zeros(3))


@pytest.mark.skipif(memory._libc is None, reason="this system has none")
def test_large_tensors_ask_for_huge_pages(monkeypatch):
    monkeypatch.setattr(memory, "_libc", libc := Mock())
    for numel in (0, 1, 2**19 - 1):  # stay as they are
        flat = torch.empty(numel)
        assert memory.in_huge_pages(flat) is flat
    assert not libc.madvise.called
    flat = torch.empty(2**19)
    assert memory.in_huge_pages(flat) is flat
    ((begin, length, advice),) = [call.args for call in libc.madvise.mock_calls]
    assert 0 <= begin.value - flat.data_ptr() < mmap.PAGESIZE
    assert begin.value % mmap.PAGESIZE == 0
    assert begin.value + length.value == flat.data_ptr() + flat.nbytes
    assert advice == mmap.MADV_HUGEPAGE


MB = 2**20


def test_caps():
    for bucket_cap_mb, caps in (
        (None, (1 * MB, 25 * MB)),
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
ASSIGNED = {
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
    ("sizes", "keys", "order", "caps", "expected"), ASSIGNED.values(), ids=ASSIGNED
)
def test_members(sizes, keys, order, caps, expected):
    gradients = list(zip(sizes, keys, strict=True))
    assert assign(gradients, range(len(sizes)) if order is None else order, caps) == expected


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
    for order in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], []):  # what is no order
        with pytest.raises(ValueError, match="each of the 3 gradients exactly once, got"):
            assign([(4, "f")] * 3, order, [8])
