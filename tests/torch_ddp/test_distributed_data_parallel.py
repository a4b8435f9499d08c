"""What the wrapper adds to the Reducer, as torch's class has it."""

import copy
import gc
import io
import pickle
import pickletools
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from ddp_from_scratch import DistributedDataParallel as Ours
from ddp_from_scratch import Reducer, broadcast_parameters, join
from ddp_from_scratch.sync.broadcast import MESSAGE_BYTES
from ddp_from_scratch.torch_ddp.logger import Logger
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
        tensors = [call.args[0] for call in called.mock_calls if call.args]
        # Without the message of the buffers, which are bytes.
        sent = [t.element_size() for t in tensors if t.dtype != torch.uint8]
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


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@on("pair")
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


@on("gloo-2")
def test_what_programs_read_and_set(world):
    model = Ours(Terms(1, 2), bucket_cap_mb=0)
    assert isinstance(model.logger, Logger)
    assert Ours._get_active_ddp_module() is None
    assert model.broadcast_bucket_size == MESSAGE_BYTES
    with pytest.raises(AttributeError):
        model.broadcast_bucket_size = 1
    assert model.require_forward_param_sync
    model.require_forward_param_sync = True
    with pytest.raises(ValueError, match=r"require_forward_param_sync=False is not.*buffers=False"):
        model.require_forward_param_sync = False


@on("gloo-2")
def test_logging_data(world):
    """The names and values that torch's class gives, without times."""
    told = []
    for kind in (Ours, Theirs):
        model = kind(Terms(3, 2), bucket_cap_mb=1)
        for _ in range(3):
            model(own(world)).backward()
        told.append(model._get_ddp_logging_data())
    ours, theirs = told
    assert ours.pop("iteration") == 3
    assert {name: theirs[name] for name in ours} == ours
    assert ours["rebuilt_per_bucket_param_indices"] == "1 0"
    model = Ours(Terms(1, 2))
    assert "has_error" not in model._get_ddp_logging_data()
    for failing in (lambda: model.register_comm_hook(None, 3), lambda: twice(model, world)):
        with pytest.raises((TypeError, RuntimeError)) as error:
            failing()
        data = model._get_ddp_logging_data()
        assert (data["has_error"], str(error.value) in data["error"]) == (1, True)


def twice(model, world):
    """Forgets a parameter, which the next forward pass notices."""
    model(own(world), (0,)).backward()
    model(own(world))


@on("gloo-2")
def test_a_static_graph_is_declared_before_training(world):
    model = Ours(Terms(1, 2))
    with torch.no_grad():
        model(1.0)
    model._set_static_graph()
    model(own(world)).backward()
    model._set_static_graph()  # it is
    model = Ours(Terms(1, 2))
    model(own(world))
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    assert "before training" in model._get_ddp_logging_data()["error"]


@on("gloo-2")
def test_another_process_group_after_a_failed_pass(world):
    def stop(gradient):
        raise KeyError

    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = Ours(Terms(1, 2), bucket_cap_mb=0, **options)
        loss, handle = model(own(world)), model.module.p0.register_hook(stop)
        with pytest.raises(KeyError):
            loss.backward()
        handle.remove()
        model.zero_grad()
        model._update_process_group(dist.new_group())
        model(own(world)).backward()
        assert_grads(model.module, mean(world))


def elsewhere(module):
    """Loads a pickled module where this package is not installed."""
    code = """if True:
        import io, sys, torch
        sys.modules["ddp_from_scratch"] = None
        print(torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)(torch.ones(1, 2)))
    """
    saved = io.BytesIO()
    torch.save(module, saved)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, input=saved.getvalue(), capture_output=True, check=True).stdout


@on("gloo-2")
def test_the_module_leaves_without_hooks(world):
    """As with torch's class: a script, a pickle and a copy know nothing of the Reducer."""
    for hooked in (False, True):
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        if hooked:
            handle = net.register_forward_hook(passes)
        model = Ours(net)
        model(torch.ones(1, 2)).sum().backward()
        saved = io.BytesIO()
        torch.save(copy.deepcopy(net), saved)
        names = pickletools_names(pickle.dumps(net)) + pickletools_names(pickle.dumps(model.module))
        assert not any(name.startswith("ddp_from_scratch") for name in names)
        other = copy.deepcopy(net)
        assert torch.equal(other(torch.ones(1, 2)), net(torch.ones(1, 2)))
        if hooked:
            handle.remove()
            assert passes not in net._forward_hooks.values()
        else:
            for module in (net, other):
                with pytest.warns((FutureWarning, DeprecationWarning), match="deprecated"):
                    torch.jit.script(module)
                assert type(copy.deepcopy(module)._forward_hooks) is OrderedDict
        # The hooks are there, but for calls: a changed module is noticed.
        net[0].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"parameter 0.bias became"):
            net(torch.ones(1, 2))
        assert other(torch.ones(1, 2)).requires_grad


def passes(module, inputs, output):
    return None


def pickletools_names(pickled):
    return [str(argument) for _, argument, _ in pickletools.genops(pickled) if argument]


@on("gloo-2")
def test_a_scripted_module_and_an_average_of_weights(world):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.warns((FutureWarning, DeprecationWarning), match="deprecated"):
        scripted = torch.jit.script(net)
    for module in (scripted, net):
        model = Ours(module)
        AveragedModel(model.module).update_parameters(model.module)
        if module is net:
            AveragedModel(model).update_parameters(model)
        x = torch.full((1, 2), float(world.rank))
        model(x).sum().backward()
        everyone = [None] * world.world_size
        dist.all_gather_object(everyone, module[0].weight.grad.tolist())
        assert everyone[0] == everyone[1]
        module[0].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"parameter 0.bias became"):
            model(x)
        module[0].bias.requires_grad_(True)


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_saved_module_loads_where_this_package_is_not_installed():
    for hooked in (False, True):
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        if hooked:  # the module's table of hooks then stays
            handle = net.register_forward_pre_hook(nullcontext().__exit__)  # does nothing
        reducer = Reducer(net)
        assert elsewhere(net).startswith(b"tensor(")
        reducer.remove()
        assert elsewhere(net).startswith(b"tensor(")
        if hooked:
            handle.remove()


@on("gloo_pair")
def test_a_scale_is_the_same_on_all_ranks_after_join(world):
    """The rank that ends first misses an update, in which the scale of the other grows."""
    for wrapped, given in product((True, False), (True, False, "two")):
        net = nn.Linear(3, 1)
        broadcast_parameters(net)
        called = Ours(net) if wrapped else net
        open_context = called.join if wrapped else partial(join, Reducer(net))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        settings = {"init_scale": 16.0, "growth_interval": 3}
        scaler, other = (torch.amp.GradScaler("cpu", **settings) for _ in range(2))
        known = {True: scaler, False: None, "two": [other, scaler]}[given]
        text = r"missed updates of a GradScaler.*grad_scaler=scaler"
        raises = nullcontext() if known else pytest.raises(RuntimeError, match=text)
        for _ in range(3):
            with raises, open_context(grad_scaler=known):
                for step in range(2 + world.rank):
                    optimizer.zero_grad()
                    loss = called(torch.full((2, 3), world.rank + step + 1.0)).sum()
                    scaler.scale(loss).backward()
                    if step < 2:
                        assert net.bias.grad.item() / scaler.get_scale() == 2 or not known
                    scaler.step(optimizer)
                    scaler.update()
            if not known:
                break
        else:
            assert scaler.get_scale() == 16.0 * 2**3
        with open_context():  # ends on all ranks at once, so nothing is compared
            called(torch.ones(1, 3)).sum().backward()


@on("gloo-2")
def test_a_scaler_that_one_rank_has_dropped_is_not_compared(world):
    """Garbage that is part of a cycle stays until Python next collects it."""
    gc.collect()
    gc.disable()
    try:
        if world.rank == 0:
            scaler = torch.amp.GradScaler("cpu")
            scaler.itself = scaler
            del scaler
        net = nn.Linear(3, 1)
        with join(Reducer(net)):
            for _ in range(1 + world.rank):
                net(torch.ones(1, 3)).sum().backward()
    finally:
        gc.enable()
