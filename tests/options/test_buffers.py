"""Buffers: after each average all ranks have rank 0's. The table of programs trains with them."""

import copy
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import DistributedDataParallel as Ours
from ddp_from_scratch import Reducer, broadcast_buffers, broadcast_parameters
from tests.support.on_ranks import on


class Counted(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.full((2,), float(value)))

    def forward(self, x=1.0):
        return (self.p * x * self.b).sum()


@on("gloo_pair")
def test_rank_0s_at_the_end_of_what_averages(world):
    """Not of what accumulates; nothing is sent in forward, and nothing that is ignored."""
    model = Counted(5.0 + world.rank)
    model.register_buffer("own", torch.tensor(world.rank))
    broadcast_parameters(model, ignore=["b", "own"])
    reducer = Reducer(model, sync_buffers=True, ignore=["own"])
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        with reducer.no_sync():
            model().backward()
        assert model.b.tolist() == [5 + world.rank] * 2
        loss = model()
        assert not sent.called
        loss.backward()
        assert [call.args[0].dtype for call in sent.mock_calls].count(torch.uint8) == 1
    assert (model.b.tolist(), model.own) == ([5, 5], world.rank)
    model.b = torch.full((3,), 1.0 + world.rank)  # another tensor, and one more
    model.register_buffer("more", torch.tensor([world.rank, 7]))
    model().backward()
    assert (model.b.tolist(), model.more.tolist()) == ([1, 1, 1], [0, 7])
    plain = Counted(5.0 + world.rank)
    Reducer(plain)
    plain().backward()
    assert plain.b.tolist() == [5 + world.rank] * 2


@on("gloo-2")
def test_as_switched(world):
    def after_an_average(model):
        model.module.b.fill_(world.rank + 1)
        model().backward()
        return model.module.b.tolist()

    own = [world.rank + 1] * 2
    model = Ours(Counted(1.0 + world.rank), forward_sync_buffers=False)
    assert model.module.b.tolist() == [1, 1]  # with the parameters
    assert after_an_average(model) == own
    model.forward_sync_buffers = True
    assert after_an_average(model) == [1, 1]
    with pytest.warns(FutureWarning, match="is deprecated"):
        assert Ours(Counted(own[0]), broadcast_buffers=False).module.b.tolist() == own


@on("gloo-2")
def test_statistics_while_graphs_live(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model, alone = Ours(net), copy.deepcopy(net)
    x = torch.randn(2, world.world_size, 8, 2)
    for order in ((0, 1), (1, 0), (0, 0)):
        gradients = []
        for called, chosen in ((model, [world.rank]), (alone, range(world.world_size))):
            called.zero_grad()
            sums = [0.0, 0.0]
            for rank in chosen:
                for k in (0, 1):
                    sums[k] += called(x[k, rank]).square().sum() / len(chosen)
            for k in order:
                sums[k].backward(retain_graph=True)
            gradients.append([p.grad for p in called.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    assert model.module[1].num_batches_tracked == 6


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.tensor([3.0, 4.0]))

    def forward(self):
        return (self.p * self.table).sum()


@on("gloo-2")
def test_tables_that_a_graph_needs(world):
    """One that stays the same may be saved; one that changes raises, never silently wrong."""
    model = Ours(Table())
    first, second = model(), model()
    first.backward()
    second.backward()
    loss = model()
    model.module.table = model.module.table + world.rank
    loss.backward()  # needs the table as it was
    assert model.module.p.grad.tolist() == [9, 12]
    assert model.module.table.tolist() == [3, 4]
    model.module.table = model.module.table + world.rank
    loss = model()
    loss.backward(retain_graph=True)
    if world.rank:
        with model.no_sync(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Cached(Counted):
    """Has buffers of two dtypes, one of which forward may replace."""

    def __init__(self):
        super().__init__(3.0)
        self.register_buffer("mask", torch.ones(1, 2))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x=1.0):
        return super().forward(x) * self.mask.sum()


def differing():
    """What a rank does to its buffers, and how its error names the buffer."""
    return [
        (lambda m: setattr(m, "mask", torch.ones(300, 2)), "mask: shape (300, 2)"),
        (lambda m: setattr(m, "mask", m.mask.double()), "mask: shape (1, 2), torch.float64"),
        (lambda m: m.mask.resize_(2, 2).fill_(1), "mask: shape (2, 2)"),
        (lambda m: setattr(m.mask, "data", m.mask.half()), "mask: shape (1, 2), torch.float16"),
        (lambda m: setattr(m, "mask", None), "mask: shape (1, 2)"),
        (lambda m: m.register_buffer("more", torch.ones(1)), "more: shape (1,)"),
        (lambda m: m.register_buffer("made", m._buffers.pop("mask")), "mask: shape (1, 2)"),
        (lambda m: setattr(m, "mask", torch.ones(1).expand(1, 2)), "mask is expanded"),
        (lambda m: setattr(m, "mask", torch.ones(1, 2).to_sparse()), "mask is sparse"),
        (lambda m: setattr(m, "mask", torch.ones(1, 2, device="meta")), "mask is on the meta"),
    ]


@on("pair")
def test_buffers_that_differ_between_ranks_are_named_on_all(world):
    """Wherever they change: before the first average or later, on rank 0 or on another."""
    for change, text in differing():
        for odd, later, large in ((0, 0, False), (1, 1, False), (0, 1, True), (1, 0, True)):
            model = Cached()
            if large:  # the flag then goes by itself
                model.register_buffer("large", torch.arange(2**16) + world.rank)
            reducer = Reducer(model, sync_buffers=True)
            for _ in range(later):
                model().backward()
            if world.rank == odd:
                loss = model()
                change(model)
            else:
                loss = model()
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with pytest.raises(RuntimeError, match="the ranks' buffers differ: rank 0 has ") as e:
                loss.backward()
            texts = [None] * world.world_size
            dist.all_gather_object(texts, str(e.value))
            assert texts == texts[:1] * len(texts)
            assert text in texts[0]
            for name, buffer in model.named_buffers():
                assert buffer.is_meta or torch.equal(buffer.to_dense(), before[name].to_dense())
            reducer.remove()


@on("gloo_pair")
def test_after_the_error_of_differing_buffers_training_goes_on(world):
    model = Cached()
    Reducer(model, sync_buffers=True)
    model().backward()
    for _ in range(2):
        if world.rank:
            model.mask = torch.ones(3, 2)
        with pytest.raises(RuntimeError, match=r"mask: shape \(1, 2\).*mask: shape \(3, 2\)"):
            model().backward()
    model.mask = torch.full((1, 2), 1.0 + world.rank)
    model().backward()
    assert model.mask.tolist() == [[1, 1]]


@on("gloo_pair")
def test_what_a_step_sends_for_buffers(world):
    """One message while the layout stays; a change on all ranks costs a comparison, once."""
    model = Cached()
    Reducer(model, sync_buffers=True)
    model().backward()
    counts = []
    names = ("broadcast", "all_reduce", "all_gather", "all_gather_object")
    for step in range(4):
        with ExitStack() as stack:
            spies = [
                stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name)))
                for name in names
            ]
            if step == 1:
                model.mask = torch.full((5, 2), 1.0 + world.rank)
            if step == 2:  # another tensor of the same shape is no change
                model.mask = model.mask + world.rank
            model().backward()
            counts.append([spy.call_count for spy in spies])
        assert model.mask.tolist() == [[1, 1]] * (1 if step == 0 else 5)
    # The gradients and the buffers; in the step of the change the digests, and the buffers again.
    assert counts == [[0, 2, 0, 0], [0, 3, 1, 0], [0, 2, 0, 0], [0, 2, 0, 0]]


@on("gloo_pair")
def test_a_first_buffer_that_appears_late(world):
    """Ranks without buffers send nothing; every hundredth average compares."""
    model = nn.Linear(1, 1)
    reducer = Reducer(model, sync_buffers=True)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        for _ in range(2):
            model(torch.ones(1)).backward()
        assert sent.call_count == 2
    model.register_buffer("late", torch.tensor(world.rank))
    reducer.core.iteration = 99
    model(torch.ones(1)).backward()
    assert model.late == world.rank
    model(torch.ones(1)).backward()
    assert model.late == 0
    reducer.remove()
    reducer = Reducer(nn.Linear(1, 1), sync_buffers=True)
    reducer.module(torch.ones(1)).backward()
    if world.rank:
        reducer.module.register_buffer("late", torch.ones(1))
    reducer.core.iteration = 100
    with pytest.raises(RuntimeError, match="rank 0 has only 0 buffers; rank 1 has buffer late"):
        reducer.module(torch.ones(1)).backward()


def kinds_of_tensors():
    complex_one = torch.tensor([1 + 2j, 3 - 4j])
    with torch.inference_mode():
        inference = torch.full((2,), 5.0)
    return {
        "conjugated": complex_one.conj(),
        "negated": complex_one.conj().imag,
        "inference": inference,
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "strided": torch.arange(8.0)[::2],
        "empty": torch.empty(0, 3),
        "complex128": torch.tensor(1 + 1j, dtype=torch.complex128),
        "truth": torch.tensor([True, False]),
        "float16": torch.tensor([1, 2, 3], dtype=torch.float16),
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "int64": torch.tensor(3),
    }


@on("pair")
def test_every_kind_of_tensor_is_sent(world):
    for how in ("average", "broadcast_buffers", "broadcast_parameters"):
        model = nn.Linear(1, 1)
        for name, tensor in kinds_of_tensors().items():
            with torch.inference_mode(tensor.is_inference()):
                if world.rank:
                    tensor.copy_(torch.ones_like(tensor))
            model.register_buffer(name, tensor)
        before = dict(model.named_buffers())
        if how == "average":
            Reducer(model, sync_buffers=True)
            model(torch.ones(1)).backward()
        else:
            {"broadcast_buffers": broadcast_buffers}.get(how, broadcast_parameters)(model)
        for name, tensor in kinds_of_tensors().items():
            assert torch.equal(getattr(model, name), tensor), (how, name)
            assert getattr(model, name) is before[name]


def test_what_cannot_be_sent_is_refused_at_once(ranks):
    ranks("gloo", 2)(refused)


def refused(world):
    unsendable = {
        "is sparse or quantised": torch.ones(2).to_sparse(),
        "is on the meta device": torch.ones(2, device="meta"),
        "is expanded": torch.ones(1).expand(2),
    }
    for text, tensor in unsendable.items():
        model = nn.Linear(1, 1)
        model.register_buffer("one", tensor)
        for call in (broadcast_parameters, broadcast_buffers, Ours):
            with pytest.raises(ValueError, match=f"buffer one {text}"):
                call(model)
        with pytest.raises(ValueError, match=f"buffer one {text}"):
            Reducer(model, sync_buffers=True)
        Reducer(model, ignore=["one"], sync_buffers=True).remove()


@on("pair")
def test_broadcast_buffers_compares_first(world):
    model = Cached()
    if world.rank:
        model.mask = torch.ones(9, 2)
    with pytest.raises(RuntimeError, match=r"the ranks' buffers differ: .*1, 2.*rank 1 .*9, 2"):
        broadcast_buffers(model)


@on("pair")
def test_buffers_that_differ_inside_join(world):
    for odd in (0, 1):
        model = Ours(Cached())
        model().backward()

        def steps(model, odd):
            with model.join():
                for step in range(2 + world.rank):
                    if step == 1 and world.rank == odd:
                        model.module.mask = torch.ones(4, 2)
                    model().backward()

        with pytest.raises(RuntimeError, match=r"differ: .*mask: shape.*mask: shape"):
            steps(model, odd)
        model = Ours(Cached())
        with model.join():  # a cache that grows on all ranks, also on those that have ended
            for step in range(2 + world.rank):
                if step == 1:
                    model.module.mask = torch.full((4, 2), 1.0 + world.rank)
                model().backward()
        assert model.module.mask.tolist() == [[1 + 1] * 2] * 4
