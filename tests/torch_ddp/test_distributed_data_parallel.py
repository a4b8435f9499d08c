"""What the wrapper adds to the Reducer, as torch's class has it."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import DistributedDataParallel as Ours
from tests.support.on_ranks import on
from tests.support.terms import Terms, assert_grads, mean, own, recorded


@on("gloo-2")
def test_state_dicts_have_torchs_names(world):
    model = Ours(Terms(1, 2))
    assert model.state_dict().keys() == Theirs(Terms(1, 2)).state_dict().keys()
    nn.init.constant_(model.module.p1, 3)
    for saved in (model.module.state_dict(), model.state_dict()):
        other = Ours(Terms(1, 2))
        other.load_state_dict(saved)
        assert other.module.p1.tolist() == [3, 3]


@on("gloo-2")
def test_what_is_ignored(world):
    """And gradients that require_backward_grad_sync keeps from being averaged."""
    model = Terms(1, 2)
    model.register_buffer("b", torch.tensor([float(world.rank)]))
    model.p0.data += world.rank
    Ours._set_params_and_buffers_to_ignore_for_model(model, ["p0", "b"])
    wrapped = Ours(model)
    assert [name for name, _ in Ours._get_data_parallel_params(model, named_params=True)] == ["p1"]
    for synchronised in (True, True, False):
        wrapped.zero_grad()
        wrapped.require_backward_grad_sync = synchronised
        wrapped(own(world)).backward()
        assert model.p0.grad.tolist() == [own(world)]
        assert model.p1.grad.tolist() == [2 * (mean if synchronised else own)(world)] * 2
    assert (model.p0.item(), model.b.item()) == (world.rank, world.rank)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("b", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x, more):
        self.seen += [x.dtype, more["y"].dtype, self.fc.weight.dtype, self.b.dtype]
        return self.fc(x + more["y"]) * self.b


@on("gloo_pair")
def test_mixed_precision(world):
    bf16, fp16 = torch.bfloat16, torch.float16
    for reduce_dtype, size in ((None, 2), (torch.float32, 4)):
        precision = _MixedPrecision(bf16, reduce_dtype, fp16)
        model = Ours(Casts(), mixed_precision=precision, shared_memory=False)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
            for _ in range(2):
                out = model(torch.ones(2, 4), {"y": torch.ones(2, 4)})
                out.float().sum().backward()
        assert model.module.seen == [bf16, bf16, bf16, fp16] * 2
        # In shared memory nothing is sent, and nothing is compressed.
        sent = [call.args[0].element_size() for call in called.mock_calls if call.args]
        assert world.backend == "mpi" or sent == [size] * 2
        weight = model.module.fc.weight
        assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
        assert weight.grad.tolist() == [[8.0] * 4] * 4


@on("gloo_pair")
def test_copies(world):
    for how in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        model = Ours(Terms(1, 2), find_unused_parameters=True, bucket_cap_mb=0)
        model(own(world), (0,)).backward()
        other = how(model) if world.rank == 0 else None
        dist.barrier()
        other = other or how(model)  # the others make theirs later
        for m in (model, other):
            m.zero_grad()
            with recorded("all_reduce") as sent:
                m(own(world), (0,)).backward()
            assert sent == [2, 1, 2]
            assert m.module.p0.grad.tolist() == [mean(world)]
            assert m.module.p1.grad is None
    with pytest.raises(RuntimeError, match="default process group"):
        copy.deepcopy(Ours(Terms(1, 2), process_group=dist.new_group()))


@on("gloo-3")
def test_another_process_group_and_a_mesh(world):
    """First ranks 0 and 1 average, then all three; the hooks of the first group are gone."""
    pair = dist.new_group([0, 1])
    x = float(world.rank + 1)
    if world.rank < 2:
        model = Ours(Terms(1, 2), process_group=pair)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        model(x).backward()
        assert_grads(model.module, 1.5)
        model.zero_grad()
        model._update_process_group(dist.group.WORLD)
        assert model._get_ddp_logging_data()["comm_hook"] == str(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model = Ours(Terms(1, 2), init_sync=False)
    for _ in range(3):
        model(x).backward()
        assert_grads(model.module, 2)
        model.zero_grad()
    mesh = dist.init_device_mesh("cpu", (world.world_size,))
    model = Ours(Terms(1, 2), device_mesh=mesh)
    model(own(world)).backward()
    assert_grads(model.module, mean(world))
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        Ours(Terms(1), process_group=mesh.get_group(), device_mesh=mesh)


@on("gloo-2")
def test_what_is_refused(world):
    def of(*arguments: Any, **options: Any) -> Callable[[], Any]:
        return lambda: Ours(*(arguments or (Terms(1),)), **options)

    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (RuntimeError, "is not needed when a module", of(nn.ReLU())),
        (ValueError, "parameter weight is lazy", of(nn.LazyLinear(1))),
        (ValueError, "only be None or contain", of(device_ids=[0, 1])),
        (ValueError, "modules on a single GPU, got", of(device_ids=[0])),
        (ValueError, "lazy_bucket_allocation=True is .*saves", of(lazy_bucket_allocation=True)),
        (ValueError, "delay_all_reduce_named.* are not supp", of(delay_all_reduce_named_params=[])),
        (ValueError, "are not supported", of(param_to_hook_all_reduce=nn.Parameter(torch.ones(1)))),
        (TypeError, "callable", lambda: of()().register_comm_hook(None, 3)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    with pytest.warns(FutureWarning, match="check_reduction"):
        Ours(Terms(1), check_reduction=True)


class Scaled(nn.Module):
    """Its gradient is its input, through a checkpoint if there is one."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.p, self.reentrant = nn.Parameter(torch.zeros(1)), reentrant

    def forward(self, x):
        x = torch.full((1,), x, requires_grad=True)
        if self.reentrant is None:
            return self.times(x)
        return checkpoint(self.times, x, use_reentrant=self.reentrant)

    def times(self, x):
        return (self.p * x).sum()


@on("pair")
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_no_sync_around_forward_alone(world, reduce):
    """Three parts stay local, and the fourth averages all; with every option."""
    options = [{}, {"static_graph": True}, {"find_unused_parameters": True}]
    options += [{"gradient_as_bucket_view": True}, {"shared_memory": False}]
    for option in options:
        for reentrant in (None, False, True):
            model = Ours(Scaled(reentrant), reduce=reduce, **option)
            for _ in range(2):
                model.zero_grad()
                for part in range(4):
                    with model.no_sync() if part < 3 else nullcontext():
                        loss = model(own(world) + part)
                    loss.backward()
                    local = sum(own(world) + p for p in range(part + 1))
                    if part < 3:
                        assert model.module.p.grad.item() == local
                total = 4 * mean(world) + 6
                times = world.world_size if reduce == "sum" else 1
                assert model.module.p.grad.item() == total * times


def forward(model, x, no_sync=False):
    with model.no_sync() if no_sync else nullcontext():
        return model(x)


def both_outside(model, x):
    forward(model, x).backward()


def backward_alone(model, x):
    loss = forward(model, x)
    with model.no_sync():
        loss.backward()


def forward_alone(model, x):
    forward(model, x, no_sync=True).backward()


def an_evaluation_between(model, x):
    loss = forward(model, x, no_sync=True)
    with torch.no_grad():
        model(x)
    loss.backward()


def in_parts(model, x):
    loss = forward(model, x, no_sync=True)
    (loss * 0.25).backward(retain_graph=True)
    (loss * 0.75).backward()


def two_forwards(model, x):
    losses = [forward(model, x / 2, no_sync=True) for _ in range(2)]
    for loss in losses:
        loss.backward()


def the_last_forward_outside(model, x):
    (forward(model, x / 2, no_sync=True) + forward(model, x / 2)).backward()


def by_hand(model, x):
    model.require_backward_grad_sync = False
    loss = model(x)
    model.require_backward_grad_sync = True
    loss.backward()


def through_the_module(model, x):
    forward(model, x / 2, no_sync=True).backward()
    (model.module(x / 2)).backward()


def through_a_method(model, x):
    with model.no_sync():
        model(x / 2).backward()
    model.module.times(torch.full((1,), x / 2)).backward()


def as_pipelines(model, x):
    loss = forward(model, x, no_sync=True)
    model.reducer.prepare_for_backward([loss])
    loss.backward()


def after_an_exception(model, x):
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    model(x).backward()


@on("gloo_pair")
def test_forward_and_backward_decide_together(world):
    averages = [both_outside, the_last_forward_outside, through_the_module, through_a_method]
    averages += [as_pipelines, after_an_exception]
    local = [backward_alone, forward_alone, an_evaluation_between, in_parts, two_forwards, by_hand]
    for reentrant in (None, False, True):
        for programs, expected in ((averages, mean(world)), (local, own(world))):
            for program in programs:
                model = Ours(Scaled(reentrant))
                for _ in range(2):  # and again, whatever the first left behind
                    model.zero_grad()
                    program(model, own(world))
                    assert model.module.p.grad.item() == expected, program.__name__
                model.zero_grad()
                both_outside(model, own(world))
                assert model.module.p.grad.item() == mean(world), program.__name__


@on("pair")
def test_forward_alone_under_no_sync_inside_join(world):
    """Each second step averages what both have brought; a rank without data brings nothing."""
    model = Ours(Scaled())
    found = []
    with model.join():
        for step in range(2 + 2 * world.rank):
            loss = forward(model, own(world), no_sync=step % 2 == 0)
            loss.backward()
            if step % 2:
                found.append(model.module.p.grad.item())
                model.zero_grad()
    size = world.world_size
    assert found == [2 * mean(world), 2 * own(world) / size][: 1 + world.rank]
