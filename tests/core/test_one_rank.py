"""One rank has nothing to average: its gradients stay where autograd has put them."""

import pytest
import torch

from ddp_from_scratch import Reducer
from ddp_from_scratch.core.bucket import FlatBucket
from ddp_from_scratch.core.observer import Observer
from ddp_from_scratch.core.view_bucket import ViewBucket

pytestmark = pytest.mark.usefixtures("alone")


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x, second=True):
        x = self.first(x)
        return (self.second(x) if second else x).sum()


def gradients(make=lambda model: None, run=lambda reducer, loss: loss().backward(), second=True):
    torch.manual_seed(0)
    model = Parts()
    reducer = make(model)
    for _ in range(3):
        model.zero_grad()
        run(reducer, lambda: model(torch.ones(2, 3), second))
    return [p.grad for p in model.parameters()]


def never(*_):
    raise AssertionError("a bucket was packed")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_nothing_is_packed(options, monkeypatch):
    monkeypatch.setattr(FlatBucket, "pack", never)
    monkeypatch.setattr(ViewBucket, "pack", never)
    monkeypatch.setattr(ViewBucket, "pack_one", never)
    averaged = gradients(lambda model: Reducer(model, **options))
    assert all(map(torch.equal, averaged, gradients()))


def test_a_parameter_that_is_not_used_has_no_gradient():
    averaged = gradients(lambda m: Reducer(m, find_unused_parameters=True), second=False)
    assert [gradient is None for gradient in averaged] == [False, False, True, True]


def test_a_sum_is_weighted():
    def run(reducer, loss):
        reducer.weight(3)
        loss().backward()

    weighted = gradients(lambda model: Reducer(model, reduce="sum"), run)
    assert all(torch.equal(w, 3 * g) for w, g in zip(weighted, gradients(), strict=True))


def test_a_comm_hook_is_called(monkeypatch):
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    def make(model):
        reducer = Reducer(model)
        reducer.register_comm_hook(None, hook)
        return reducer

    assert all(torch.equal(d, 2 * g) for d, g in zip(gradients(make), gradients(), strict=True))


def test_an_observer_sees_packed_buckets():
    class Sums(Observer):
        def on_packed(self, bucket):
            seen.append(float(bucket.buffer().sum()))

    seen = []
    expected = float(sum(g.sum() for g in gradients(lambda m: Reducer(m, observers=[Sums()]))))
    assert seen == [pytest.approx(expected)] * 3


def test_accumulation_and_a_second_backward_pass():
    def run(reducer, loss):
        with reducer.no_sync():
            loss().backward()
        both = loss()
        both.backward(retain_graph=True)
        both.backward()

    def plain(reducer, loss):
        loss().backward()
        both = loss()
        both.backward(retain_graph=True)
        both.backward()

    assert all(map(torch.equal, gradients(Reducer, run), gradients(run=plain)))


def test_a_sparse_gradient_is_coalesced():
    table = torch.nn.Embedding(4, 2, sparse=True)
    Reducer(table)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad.is_coalesced()


def test_a_large_view_has_its_gradient_during_backward():
    """With more ranks it is packed when it is ready, and has none until the average."""
    layer, seen = torch.nn.Linear(300, 300), []
    Reducer(layer, gradient_as_bucket_view=True)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    layer(torch.ones(1, 300)).sum().backward()
    assert seen == [True]
