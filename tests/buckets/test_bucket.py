"""One bucket in one process: a fake comm hook stands for the other ranks."""

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
        self.sent: list[torch.Tensor] = []

    def __call__(self, state: object, bucket: Bucket) -> torch.futures.Future:
        self.sent.append(bucket.buffer().clone())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future


def make(*parameters: nn.Parameter, as_view: bool = False) -> Bucket:
    sizes = [Gradient(p.numel(), p.nbytes, p.dtype) for p in parameters]
    (layout,) = assign_buckets(sizes, range(len(parameters)), [2**62])
    return Bucket(layout, parameters, as_view)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(100).as_strided(shape, strides))


def fill(p: nn.Parameter, start: int = 0) -> torch.Tensor:
    """Lets backward give `p` the gradient start, start + 1, ...; returns it."""
    expected = torch.arange(start, start + p.numel()).to(p.dtype).view(p.shape)
    p.backward(expected)
    return expected


as_view = pytest.mark.parametrize("as_view", [False, True])


@pytest.fixture(autouse=True, params=[0, 2**15], ids=["large", "small"])
def small(request, monkeypatch):
    """Gradients of fewer bytes than this are packed together."""
    monkeypatch.setattr("ddp_from_scratch.buckets.packing._SMALL", request.param)
    return request.param


def test_full_when_the_last_member_is_ready():
    bucket = make(parameter(1), parameter(1), parameter(1))
    assert [bucket.mark_ready(index) for index in (2, 0, 0, 1, 1)] == [False] * 3 + [True] * 2


@as_view
def test_packs_its_gradients_one_behind_the_other(as_view):
    weight, bias = parameter(2, 2), parameter(3)
    bucket, hook = make(weight, bias, as_view=as_view), Doubled()
    fill(weight), fill(bias, 10)
    bucket.launch(LaunchArgs(hook, None))
    assert [buffer.tolist() for buffer in hook.sent] == [[0, 1, 2, 3, 10, 11, 12]]


@as_view
def test_average_is_in_grad_after_finish_and_not_before(as_view):
    weight, bias = parameter(2, 2), parameter(3)
    bucket, hook = make(weight, bias, as_view=as_view), Doubled()
    fill(weight), fill(bias, 10)
    bucket.launch(LaunchArgs(hook, None))
    assert bucket.state is BucketState.LAUNCHED
    assert bias.grad.tolist() == [10, 11, 12]
    bucket.finish()
    assert bucket.state is BucketState.FILLING
    assert weight.grad.tolist() == [[0, 2], [4, 6]]
    assert bias.grad.tolist() == [20, 22, 24]


@as_view
def test_finish_is_idempotent(as_view):
    p = parameter(2)
    bucket, hook = make(p, as_view=as_view), Doubled()
    bucket.finish()
    assert p.grad is None
    fill(p, 1)
    bucket.launch(LaunchArgs(hook, None))
    bucket.finish()
    bucket.finish()
    assert len(hook.sent) == 1
    assert p.grad.tolist() == [2, 4]


def test_finish_waits_for_every_member_again():
    bucket = make(parameter(1))
    fill(bucket.parameters()[0])
    assert bucket.mark_ready(0)
    bucket.launch(LaunchArgs(Doubled(), None))
    assert not bucket.missing
    bucket.finish()
    assert bucket.missing == {0}


def test_a_gradient_that_changes_before_the_launch_is_sent_as_it_is_then():
    p = parameter(2)
    bucket, hook = make(p), Doubled()
    fill(p, 1)
    bucket.mark_ready(0)
    fill(p, 1)
    bucket.launch(LaunchArgs(hook, None))
    assert hook.sent[0].tolist() == [2, 4]


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


LAYOUTS = {
    "contiguous": lambda: parameter(2, 3, 2, 2),
    "channels-last": lambda: nn.Parameter(
        torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    ),
    "transposed": lambda: nn.Parameter(torch.zeros(3, 2).t()),
    "with holes": lambda: strided((2, 3), (10, 2)),
    "odd stride of a dimension of size 1": lambda: strided((3, 1), (1, 7)),
    "0-dim": lambda: parameter(),
    "empty": lambda: parameter(0, 3),
}
each_layout = pytest.mark.parametrize("build", LAYOUTS.values(), ids=LAYOUTS.keys())


@each_layout
@as_view
def test_every_memory_layout_comes_back_element_for_element(build, as_view):
    before, p, after = parameter(1), build(), parameter(1)
    bucket = make(before, p, after, as_view=as_view)
    fill(before, 50), fill(after, 60)
    expected = fill(p, 1)
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    assert torch.equal(p.grad, 2 * expected)
    assert (before.grad.item(), after.grad.item()) == (100, 120)


@each_layout
def test_views_lie_in_the_buffer_and_do_not_overlap(build):
    p = build()
    bucket = make(parameter(1), p, parameter(1))
    view = bucket.views[1]
    assert view.shape == p.shape
    view.fill_(1)
    assert bucket.buffer().tolist() == [0] + [1] * p.numel() + [0]


def test_views_keep_the_strides_of_a_dense_parameter():
    """So autograd, which lays a gradient out as its parameter, accumulates without transposing."""
    for name in ("contiguous", "channels-last", "transposed"):
        p = LAYOUTS[name]()
        assert make(p).views[0].stride() == p.stride(), name


def test_views_of_a_parameter_with_holes_are_contiguous():
    assert make(LAYOUTS["with holes"]()).views[0].is_contiguous()


@pytest.mark.parametrize("name", ["contiguous", "channels-last"])
def test_gradient_as_bucket_view_copies_nothing_once_grad_lies_there(name, monkeypatch):
    p = LAYOUTS[name]()
    bucket = make(p, as_view=True)
    fill(p)
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    assert lies_at(p.grad, bucket.views[0])

    def copied(*tensors):
        raise AssertionError("a gradient was copied")

    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    p.grad.zero_()
    expected = fill(p, 1)
    assert lies_at(p.grad, bucket.views[0])  # autograd accumulated in place
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    assert torch.equal(p.grad, 2 * expected)


def test_gradient_as_bucket_view_takes_a_new_gradient_in():
    """After zero_grad(set_to_none=True) autograd makes a tensor of its own."""
    p = parameter(2)
    bucket = make(p, as_view=True)
    for start in (1, 5):
        p.grad = None
        fill(p, start)
        bucket.launch(LaunchArgs(Doubled(), None))
        bucket.finish()
        assert lies_at(p.grad, bucket.views[0])
        assert p.grad.tolist() == [2 * start, 2 * start + 2]


def test_without_views_grad_keeps_its_own_memory():
    p = parameter(2)
    bucket = make(p)
    fill(p, 1)
    memory = p.grad.data_ptr()
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    assert p.grad.data_ptr() == memory
    bucket.buffer().zero_()
    assert p.grad.tolist() == [2, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_buffer_has_the_dtype_of_its_parameters(dtype):
    p = parameter(2, dtype=dtype)
    bucket = make(p)
    fill(p, 1)
    bucket.launch(LaunchArgs(Doubled(), None))
    bucket.finish()
    assert bucket.buffer().dtype == dtype
    assert p.grad.tolist() == [2, 4]


# What a comm hook sees --------------------------------------------------------------------------


def test_a_hook_sees_gradients_and_parameters():
    weight, bias = parameter(2, 2), parameter(3)
    bucket = make(weight, bias)
    fill(weight), fill(bias, 10)
    seen = []

    def hook(state, bucket):
        assert state == "state"
        assert (bucket.index(), bucket.is_last()) == (0, True)
        assert [p is q for p, q in zip(bucket.parameters(), (weight, bias), strict=True)]
        seen.extend(g.tolist() for g in bucket.gradients())
        bucket.gradients()[1].fill_(7)
        assert bucket.buffer().tolist() == [0, 1, 2, 3, 7, 7, 7]
        return Doubled()(state, bucket)

    bucket.launch(LaunchArgs(hook, "state"))
    bucket.finish()
    assert seen == [[[0, 1], [2, 3]], [10, 11, 12]]
    assert bias.grad.tolist() == [14, 14, 14]


@as_view
def test_set_buffer_lasts_until_the_average_is_in_grad(as_view):
    p = parameter(2)
    bucket = make(p, as_view=as_view)
    for start in (1, 5):
        p.grad = None
        fill(p, start)

        def halved(state, bucket):
            assert bucket.buffer().dtype == torch.float32
            bucket.set_buffer(bucket.buffer().half())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        bucket.launch(LaunchArgs(halved, None))
        bucket.finish()
        assert p.grad.tolist() == [start, start + 1]
        assert p.grad.dtype == torch.float32


def test_set_buffer_refuses_another_size():
    with pytest.raises(ValueError, match="must have 2, got 3"):
        make(parameter(2)).set_buffer(torch.zeros(3))


def test_a_hook_that_returns_no_future_is_named():
    p = parameter(2)
    bucket = make(p)
    fill(p)

    def wrong(state, bucket):
        return bucket.buffer()

    with pytest.raises(TypeError, match=r"Future, wrong returned Tensor"):
        bucket.launch(LaunchArgs(wrong, None))


def test_a_future_that_gives_no_tensor_is_named():
    p = parameter(2)
    bucket = make(p)
    fill(p)

    def wrong(state, bucket):
        future = torch.futures.Future()
        future.set_result(3)
        return future

    bucket.launch(LaunchArgs(wrong, None))
    with pytest.raises(TypeError, match="must give a tensor, got int"):
        bucket.finish()


# Members without a gradient ---------------------------------------------------------------------


def test_absent_counts_and_contributes_zeros():
    one, other = parameter(2), parameter(1)
    bucket, hook = make(one, other), Doubled()
    bucket._flat.fill_(9)
    fill(one, 1)
    assert not bucket.mark_ready(0)
    bucket.mark_unused(1)
    assert not bucket.missing
    bucket.launch(LaunchArgs(hook, None))
    assert hook.sent[0].tolist() == [1, 2, 0]


@as_view
def test_absent_gets_the_average_where_another_rank_used_it(as_view):
    one, other = parameter(2), parameter(1)
    bucket = make(one, other, as_view=as_view)
    fill(one, 1)
    bucket.mark_ready(0)
    bucket.mark_unused(1)

    def others_add_three(state, bucket):
        bucket.buffer().add_(3)
        return Doubled()(state, bucket)

    bucket.launch(LaunchArgs(others_add_three, None))
    bucket.finish({0, 1})
    assert one.grad.tolist() == [8, 10]
    assert other.grad.tolist() == [6]


@as_view
def test_grad_of_what_nobody_used_stays_as_it_is(as_view):
    one, other = parameter(2), parameter(1)
    bucket = make(one, other, as_view=as_view)
    for old in (None, 5.0):
        for p in (one, other):
            p.grad = None
        if old is not None:  # of an earlier step, lying in the bucket if gradients are views
            fill(one), fill(other, 5)
            bucket.mark_ready(0), bucket.mark_ready(1)
            bucket.restore_grads(), bucket.finish()
        one.grad = None
        fill(one, 1)
        bucket.mark_ready(0)
        bucket.mark_unused(1)
        hook = Doubled()
        bucket.launch(LaunchArgs(hook, None))
        assert hook.sent[0].tolist() == [1, 2, old or 0]
        bucket.finish({0})
        assert one.grad.tolist() == [2, 4]
        assert other.grad is None if old is None else other.grad.tolist() == [old]


def test_a_gradient_that_comes_after_all_is_packed():
    p = parameter(2)
    bucket, hook = make(p), Doubled()
    bucket.mark_unused(0)
    fill(p, 1)
    bucket.mark_ready(0)
    bucket.launch(LaunchArgs(hook, None))
    assert hook.sent[0].tolist() == [1, 2]


def arrive(bucket, index, scale):
    """As the Reducer does with each gradient."""
    if bucket.early is not None:
        bucket.early.pack_one(index, scale)
    bucket.mark_ready(index)


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


@as_view
def test_a_second_gradient_before_the_launch_is_added(as_view):
    p = parameter(2)
    bucket, hook = make(p, as_view=as_view), Doubled()
    fill(p, 2)
    arrive(bucket, 0, 0.5)
    fill(p, 4)
    arrive(bucket, 0, 0.5)
    bucket.launch(LaunchArgs(hook, None, scale=0.5))
    bucket.finish()
    assert hook.sent[0].tolist() == [3, 4]
    assert p.grad.tolist() == [6, 8]


@as_view
def test_held_gradients_are_what_they_were(as_view):
    """Between two passes that fill the bucket together."""
    one, other = parameter(2), parameter(1)
    bucket, hook = make(one, other, as_view=as_view), Doubled()
    fill(one, 3)
    arrive(bucket, 0, 0.5)
    bucket.restore_grads()
    assert one.grad.tolist() == [3, 4]
    fill(one), fill(other, 7)
    arrive(bucket, 0, 0.5), arrive(bucket, 1, 0.5)
    bucket.launch(LaunchArgs(hook, None, scale=0.5))
    bucket.restore_grads()  # too late
    bucket.finish()
    assert hook.sent[0].tolist() == [1.5, 2.5, 3.5]
    assert one.grad.tolist() == [3, 5]


@as_view
def test_share_weighs_the_gradients(as_view):
    p = parameter(2)
    bucket, hook = make(p, as_view=as_view), Doubled()
    fill(p, 1)
    bucket.launch(LaunchArgs(hook, None, 0.5, 0.5))
    bucket.finish()
    assert hook.sent[0].tolist() == [0.5, 1]
    p.grad = torch.full((2,), float("nan"))
    bucket.launch(LaunchArgs(hook, None, 0.0))
    assert hook.sent[1].tolist() == [0, 0]


@as_view
def test_a_share_of_nothing_leaves_grad_alone(as_view):
    p = parameter(2)
    bucket, hook = make(p, as_view=as_view), Doubled()
    fill(p, 1)
    bucket.mark_ready(0)
    (
        bucket.restore_grads(),
        bucket.finish(),
    )  # of before; it lies in the bucket if gradients are views
    bucket.mark_unused(0)
    bucket.launch(LaunchArgs(hook, None, 0.0))
    bucket.finish(used=())
    assert hook.sent[0].tolist() == [0, 0]
    assert p.grad.tolist() == [1, 2]
    assert bucket.missing == {0}
