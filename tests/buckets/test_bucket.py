"""One bucket in one process: a fake comm hook stands for the other ranks.

Averages are in tests/reducer/test_table.py. Here is where gradients lie, and what a hook sees.
"""

import pytest
import torch
from torch import nn

from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.gradient_bucket import BucketState, LaunchArgs
from ddp_from_scratch.buckets.layout import Gradient, assign_buckets
from ddp_from_scratch.buckets.memory import lies_at


class Doubled:
    """A comm hook whose result is twice what was sent, in other memory."""

    def __init__(self):
        self.sent: list[list[float]] = []

    def __call__(self, state: object, bucket: Bucket) -> torch.futures.Future:
        self.sent.append(bucket.buffer().tolist())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future


def make(*parameters: nn.Parameter, as_view: bool = False) -> Bucket:
    sizes = [Gradient(p.numel(), p.nbytes, p.dtype) for p in parameters]
    (layout,) = assign_buckets(sizes, range(len(parameters)), [2**62])
    return Bucket(layout, parameters, as_view)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def fill(p: nn.Parameter, start: int = 0) -> torch.Tensor:
    """Lets backward give `p` the gradient start, start + 1, ...; returns it."""
    expected = torch.arange(start, start + p.numel()).to(p.dtype).view(p.shape)
    p.backward(expected)
    return expected


def arrive(bucket, index, scale):
    """As the Reducer does with each gradient."""
    if bucket.early is not None:
        bucket.early.pack_one(index, scale)
    return bucket.mark_ready(index)


as_view = pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])


@pytest.fixture(autouse=True, params=[0, 2**15], ids=["large", "small"])
def small(request, monkeypatch):
    """Gradients of fewer bytes than this are packed together."""
    monkeypatch.setattr("ddp_from_scratch.buckets.packing._SMALL", request.param)
    return request.param


@as_view
def test_the_phases_of_two_averages(as_view):
    weight, bias = parameter(2, 2), parameter(3)
    bucket, hook = make(weight, bias, as_view=as_view), Doubled()
    for start in (0, 1):
        for p in (weight, bias):
            p.grad = None
        bucket.finish()  # nothing was launched
        assert (weight.grad, bucket.missing, bucket.begun) == (None, {0, 1}, False)
        fill(weight, start), fill(bias, 10)
        assert [arrive(bucket, index, 1.0) for index in (1, 1, 0)] == [False, False, True]
        assert bucket.begun
        bucket.launch(LaunchArgs(hook, None))
        assert bucket.state is BucketState.LAUNCHED
        assert as_view or bias.grad.tolist() == [10, 11, 12]
        with pytest.raises(RuntimeError, match="bucket 0 is launched a second time"):
            bucket.launch(LaunchArgs(hook, None))
        bucket.wait()
        assert bucket.state is BucketState.LANDED
        bucket.finish()
        bucket.finish()
        assert bucket.state is BucketState.FILLING
        assert hook.sent[-1] == [start, start + 1, start + 2, start + 3, 10, 11, 12]
        assert weight.grad.flatten().tolist() == [2 * start + 2 * k for k in range(4)]
        assert bias.grad.tolist() == [20, 22, 24]
        assert lies_at(bias.grad, bucket.views[1]) == as_view
    assert len(hook.sent) == 2


def test_failed_wait_is_raised_and_leaves_grad_alone():
    def failing(state, bucket):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("a peer died"))
        return future

    p = parameter(2)
    bucket = make(p)
    fill(p, 1)
    bucket.launch(LaunchArgs(failing, None))
    with pytest.raises(RuntimeError, match="a peer died"):
        bucket.finish()
    assert p.grad.tolist() == [1, 2]
    bucket.reset()
    assert (bucket.state, bucket.arrived, bucket.missing) == (BucketState.FILLING, True, {0})


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


def test_gradient_as_bucket_view_copies_nothing_once_grad_lies_there(monkeypatch):
    p = parameter(2)
    bucket = make(p, as_view=True)
    fill(p)
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    p.grad.zero_()
    expected = fill(p, 1)
    assert lies_at(p.grad, bucket.views[0])  # autograd accumulated in place
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    assert torch.equal(p.grad, 2 * expected)


def test_large_gradients_lie_in_the_bucket_at_once(small):
    p = parameter(2)
    bucket = make(p, as_view=True)
    fill(p, 2)
    arrive(bucket, 0, 0.5)
    if small:
        assert p.grad.tolist() == [2, 3]
    else:
        assert p.grad is None
        assert bucket.buffer().tolist() == [1, 1.5]


# What a comm hook sees --------------------------------------------------------------------------


@as_view
def test_a_hook_sees_gradients_and_parameters_and_may_replace_the_buffer(as_view):
    weight, bias = parameter(2, 2), parameter(3)
    bucket = make(weight, bias, as_view=as_view)
    seen = []

    def hook(state, bucket):
        assert (state, bucket.index(), bucket.is_last()) == ("state", 0, True)
        assert [p is q for p, q in zip(bucket.parameters(), (weight, bias), strict=True)] == [
            True
        ] * 2
        seen.extend(g.tolist() for g in bucket.gradients())
        bucket.gradients()[1].fill_(7)
        assert bucket.buffer().tolist() == [0, 1, 2, 3, 7, 7, 7]
        assert bucket.buffer().dtype == torch.float32  # that of the last pass is gone
        bucket.set_buffer(bucket.buffer().half())
        return Doubled()(state, bucket)

    for _ in range(2):
        weight.grad = bias.grad = None
        fill(weight), fill(bias, 10)
        bucket.launch(LaunchArgs(hook, "state"))
        bucket.finish()
        assert bias.grad.tolist() == [14, 14, 14]
        assert bias.grad.dtype == torch.float32
    assert seen == [[[0, 1], [2, 3]], [10, 11, 12]] * 2
    with pytest.raises(ValueError, match="must have 7, got 3"):
        bucket.set_buffer(torch.zeros(3))


def test_memory_to_compress_into_is_kept():
    bucket = make(parameter(2))
    first = bucket.scratch(torch.Size([2]), torch.float16)
    assert bucket.scratch(torch.Size([2]), torch.float16) is first
    other = bucket.scratch(torch.Size([2]), torch.bfloat16)
    assert (other.shape, other.dtype) == (torch.Size([2]), torch.bfloat16)


# Members without a gradient, and weights ----------------------------------------------------------


@as_view
def test_absent_contributes_zeros_and_gets_the_average_where_another_rank_used_it(as_view):
    one, other, late = parameter(2), parameter(1), parameter(1)
    bucket = make(one, other, late, as_view=as_view)
    bucket._flat.fill_(9)
    fill(one, 1)
    assert not arrive(bucket, 0, 1.0)
    bucket.mark_unused(0)  # a no-op
    bucket.mark_unused(1), bucket.mark_unused(2)
    assert not bucket.missing
    fill(late, 4)  # comes after all
    arrive(bucket, 2, 1.0)
    sent = []

    def others_add_three(state, bucket):
        sent.append(bucket.buffer().tolist())
        bucket.buffer().add_(3)
        return Doubled()(state, bucket)

    bucket.launch(LaunchArgs(others_add_three, None))
    bucket.finish({0, 1, 2})
    assert sent == [[1, 2, 0, 4]]
    assert [p.grad.tolist() for p in (one, other, late)] == [[8, 10], [6], [14]]


@as_view
def test_a_weight_of_nothing_sends_zeros_and_leaves_grad_alone(as_view):
    p = parameter(2)
    bucket, hook = make(p, as_view=as_view), Doubled()
    p.grad = torch.full((2,), float("nan"))
    bucket.launch(LaunchArgs(hook, None, 0.0))
    bucket.finish()
    p.grad = None
    fill(p, 1)
    bucket.mark_ready(0)
    bucket.restore_grads(), bucket.finish()  # lies in the bucket if gradients are views
    bucket.mark_unused(0)
    bucket.launch(LaunchArgs(hook, None, 0.0))
    bucket.finish(used=())
    assert hook.sent == [[0, 0]] * 2
    assert p.grad.tolist() == [1, 2]
    assert bucket.missing == {0}
