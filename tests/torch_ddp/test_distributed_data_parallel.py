"""torch's class, beside torch's class: the same program, one import line changed."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_from_scratch import DistributedDataParallel as Ours
from ddp_from_scratch.buckets import packing
from tests.support.terms import Terms, mean, own, recorded


class Net(nn.Module):
    """Batch norm, a buffer that counts, and a branch that may be skipped."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.branch, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, branch=True):
        if self.training:
            self.calls += 1
        h = self.body(x)
        return self.head(h + self.branch(h) if branch else h)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "several buckets": {"bucket_cap_mb": 5e-4},
    "list of caps": {"bucket_cap_mb_list": [1e-4, 5e-4]},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "no buffers": {"forward_sync_buffers": False},
}


def beside_torch(world, name):
    if name == "list of caps" and not hasattr(Theirs, "_log_and_throw"):
        return
    options = OPTIONS[name]
    torch.manual_seed(world.rank)
    ours = Ours(Net(), **options)
    their_options = dict(options)
    if torch.__version__ < "2.13":
        their_options.pop("bucket_cap_mb_list", None)
        if their_options.pop("forward_sync_buffers", None) is False:
            their_options["broadcast_buffers"] = False
    theirs = Theirs(copy.deepcopy(ours.module), **their_options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    for step in range(8):
        x, y = torch.randn(4, 6), torch.randint(3, (4,))
        accumulate = step % 3 == 1
        branch = name != "unused" or (step + world.rank) % 2 == 0
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            with model.no_sync() if accumulate else nullcontext():
                cross_entropy(model(x, branch), y).backward()
            if not accumulate:
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    if world.rank == 0:
        for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_trains_as_torch(crew, name):
    crew(beside_torch, name)


def passes_on(world):
    model = Ours(Terms(1, 2))
    assert isinstance(model, nn.Module)
    assert list(model.state_dict()) == ["module.p0", "module.p1"]
    assert model.module.p0 is model.state_dict(keep_vars=True)["module.p0"]
    with model.no_sync():
        assert not model.require_backward_grad_sync
        model(own(world)).backward()
        assert model.module.p0.grad.tolist() == [own(world)]
    model(own(world)).backward()
    assert model.module.p0.grad.tolist() == [2 * mean(world)]
    model.zero_grad()
    model.require_backward_grad_sync = False
    model(own(world)).backward()
    assert model.module.p0.grad.tolist() == [own(world)]
    model.require_backward_grad_sync = True
    model.zero_grad()
    with recorded("all_reduce") as sent:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        model(own(world)).backward()
    assert sent == [3]
    assert model.module.p0.grad.tolist() == [mean(world)]


def test_passes_on_what_the_reducer_does(crew):
    crew(passes_on)


def keeps_state(world):
    torch.manual_seed(world.rank)
    model = Ours(Net())
    bare, wrapped = model.module.state_dict(), model.state_dict()
    for state in (bare, wrapped):
        other = Ours(Net())
        other.load_state_dict(state)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
    model.module.load_state_dict(bare)
    with pytest.raises(RuntimeError, match="Missing key"):
        Ours(Net()).load_state_dict({"module.head.weight": bare["head.weight"]})


def test_state_dicts_with_and_without_the_prefix(ranks):
    ranks("gloo", 2)(keeps_state)


def ignores(world):
    model = Terms(1, 2)
    model.register_buffer("b", torch.tensor([float(world.rank)]))
    model.p0.data += world.rank
    Ours._set_params_and_buffers_to_ignore_for_model(model, ["p0", "b"])
    wrapped = Ours(model)
    assert (model.p0.item(), model.b.item()) == (world.rank, world.rank)
    assert [name for name, _ in Ours._get_data_parallel_params(model, named_params=True)] == ["p1"]
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(own(world)).backward()
        assert model.p0.grad.tolist() == [own(world)]
        assert model.p1.grad.tolist() == [2 * mean(world)] * 2
    assert model.b.item() == world.rank


def test_named_parameters_and_buffers_are_ignored(pair):
    pair(ignores)


def delays(world):
    model = Terms(1, 2, 3)
    wrapped = Ours(
        model,
        delay_all_reduce_named_params=[("p2", model.p2), ("p1", model.p1)],
        param_to_hook_all_reduce=model.p0,
    )
    for _ in range(2):
        wrapped.zero_grad()
        # Gradients come in reverse order of use: p0's is the last.
        with recorded("all_reduce") as sent:
            wrapped(own(world), (0, 1, 2)).backward()
        assert sent == [5, 1]
        for k, p in enumerate(model.parameters()):
            assert p.grad.tolist() == [(k + 1) * mean(world)] * (k + 1)


def test_delayed_parameters_are_averaged_with_the_chosen_one(pair):
    pair(delays)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("b", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x, more):
        self.seen += [x.dtype, more["y"].dtype, self.fc.weight.dtype, self.b.dtype]
        return self.fc(x + more["y"]) * self.b


def lower_precision(world, reduce_dtype, size):
    precision = _MixedPrecision(torch.bfloat16, reduce_dtype, torch.float16)
    model = Ours(Casts(), mixed_precision=precision, shared_memory=False)
    sent = []
    original = dist.all_reduce
    dist.all_reduce = lambda t, **o: (sent.append(t.element_size()), original(t, **o))[1]
    try:
        for _ in range(2):
            out = model(torch.ones(2, 4), {"y": torch.ones(2, 4)})
            out.float().sum().backward()
    finally:
        dist.all_reduce = original
    bf16 = torch.bfloat16
    assert model.module.seen == [bf16, bf16, bf16, torch.float16] * 2
    # In shared memory nothing is sent, and nothing is compressed.
    assert world.backend == "mpi" or sent == [size] * 2
    weight = model.module.fc.weight
    assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    assert weight.grad.tolist() == [[8.0] * 4] * 4


@pytest.mark.parametrize(
    ("reduce_dtype", "size"), [(None, 2), (torch.float16, 2), (torch.float32, 4)]
)
def test_mixed_precision(pair, reduce_dtype, size):
    pair(lower_precision, reduce_dtype, size)


def watched(world):
    """What `Reducer` has beside torch is there on the wrapper, too."""
    model = Ours(Terms(1, 2), check_every=1, stall_after=60)
    model(own(world)).backward()
    with torch.no_grad():
        model.module.p0 += world.rank
    with pytest.raises(RuntimeError, match="average 2: parameter p0 is not the same"):
        model(own(world)).backward()
    with pytest.raises(ValueError, match="stall_after must be a positive number of seconds, got 0"):
        Ours(Terms(1, 2), stall_after=0)
    with pytest.raises(ValueError, match="straggler_every must be a number of averages, got 0"):
        Ours(Terms(1, 2), straggler_every=0)


def test_drift_check_and_stall_report(ranks):
    ranks("gloo", 2)(watched)


def functional(world):
    model = Ours(Terms(1, 2))
    values = {f"module.p{k}": torch.ones(k + 1, requires_grad=True) for k in range(2)}
    torch.func.functional_call(model, values, (3.0,)).backward()
    assert values["module.p0"].grad.tolist() == [3.0]
    assert model.module.p0.grad is None
    model(own(world)).backward()
    assert model.module.p0.grad.tolist() == [mean(world)]


def test_functional_call(pair):
    pair(functional)


def logs(world):
    model = Ours(Terms(1, 2, 2**10), bucket_cap_mb=2**-10)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(1.0).backward()
    data = model._get_ddp_logging_data()
    assert data == model.logging_data()
    assert data["module_name"] == "Terms"
    assert (data["rank"], data["world_size"]) == (world.rank, world.world_size)
    assert data["bucket_sizes"] == "4096, 12"
    assert data["comm_hook"] == "fp16_compress_hook"
    assert (data["iteration"], data["has_rebuilt_buckets"]) == (1, 1)


def test_logging_data(ranks):
    ranks("gloo", 2)(logs)


def copies_in_one_call(world):
    """With and without batched_grad_copy; and what skip_all_reduce_unused_params leaves out."""
    for batched in (False, True):
        with patch.object(packing, "_SMALL", 2**15):
            model = Ours(Terms(1, 2, 3), batched_grad_copy=batched)
            model(1.0).backward()
        model.zero_grad()
        with patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as copied:
            model(own(world)).backward()
        assert copied.call_count == 2  # into the bucket, and out of it
        assert model.module.p2.grad.tolist() == [3 * mean(world)] * 3
    unused = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = Ours(Terms(1, 2, 4), bucket_cap_mb=0, **unused)
    model(own(world), (0, 1, 2)).backward()  # the first average leaves nothing out
    model.zero_grad()
    with recorded("all_reduce") as sent:
        model(own(world), (0, 2)).backward()
    assert sent == [4, 1, 3]  # p2, p0, and who has used what


def test_options_about_copies_and_unused_buckets(pair):
    pair(copies_in_one_call)


def refuses(world):
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (RuntimeError, "is not needed when a module", lambda: Ours(nn.ReLU())),
        (RuntimeError, "uninitialized parameters", lambda: Ours(nn.LazyLinear(1))),
        (ValueError, "only be None or contain", lambda: Ours(Terms(1), device_ids=[0, 1])),
        (ValueError, "modules on a single GPU, got", lambda: Ours(Terms(1), device_ids=[0])),
        (
            ValueError,
            "lazy_bucket_allocation=True is .*True saves",
            lambda: Ours(Terms(1), lazy_bucket_allocation=True),
        ),
        (
            ValueError,
            "same time",
            lambda: Ours(Terms(1), param_to_hook_all_reduce=nn.Parameter(torch.zeros(1))),
        ),
        (RuntimeError, "the models differ", lambda: Ours(Terms(1 + world.rank))),
        (TypeError, "callable", lambda: Ours(Terms(1)).register_comm_hook(None, 3)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    with pytest.warns(FutureWarning, match="check_reduction"):
        Ours(Terms(1), check_reduction=True)


def test_what_torch_refuses(ranks):
    ranks("gloo", 2)(refuses)
