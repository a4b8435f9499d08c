"""What the wrapper adds to the Reducer, as torch's class has it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _MixedPrecision

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
