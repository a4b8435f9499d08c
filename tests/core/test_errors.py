"""Errors of the Reducer: each names the parameter and the rank, before ranks drift apart."""

import math
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import embedding
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.options.power_sgd import PowerSGDState
from tests.support.on_ranks import on
from tests.support.terms import Terms, own


def never_sent(world, **options):
    model = Terms(1, 2)
    torch.nn.init.constant_(model.p1, world.rank)
    Reducer(model, **options)
    try:
        model(own(world)).backward()
    finally:
        ddp.broadcast_parameters(model)
        model(own(world)).backward()


def step_of_a_part(world):
    """Training never calls the module itself, so no forward pass of it can notice."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    Reducer(model, bucket_cap_mb=0)
    optimizer, unrelated = (torch.optim.SGD(m.parameters(), 1.0) for m in (model, nn.Linear(1, 1)))
    before = model[0].weight.item()
    model[0](torch.full((1, 1), own(world))).sum().backward()
    unrelated.step()
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.step()
    try:
        optimizer.step()  # raises again
    finally:
        assert model[0].weight.item() == before


def step_during_backward(world):
    model = Terms(1, 2)
    Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.p0.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(own(world)).backward()


def changed(world, change, frozen=False):
    model = Terms(1, 2)
    model.p1.requires_grad_(not frozen)
    Reducer(model)
    model(own(world)).backward()
    change(model)
    model(own(world))


def set_p(k, size):
    return lambda model: setattr(model, f"p{k}", nn.Parameter(torch.zeros(size)))


def move_into_p0(model):
    model.p0 = model.p1
    del model.p1


def rename_and_add(model):
    model.renamed, model.p2 = model.p1, nn.Parameter(torch.zeros(1))
    del model.p1


def second_gradient(world, in_no_sync=False, **options):
    """It would be overwritten by the average of the first."""
    model = Terms(1, 2, 3)
    reducer = Reducer(model, **options)
    one, two = model(own(world), (1, 2)), model(own(world), (2, 0))
    one.backward()
    with reducer.no_sync() if in_no_sync else nullcontext():
        two.backward()


def undeclared_sparse(world):
    model = Terms(6)
    model.p0 = nn.Parameter(torch.zeros(5, 2))
    model.forward = lambda x: embedding(torch.tensor([1, 3]), model.p0, sparse=True).sum()
    Reducer(model)
    model(1.0).backward()


def with_hook(world, hook, **options):
    model = Terms(1, 2)
    Reducer(model, **options).register_comm_hook(None, hook)
    model(own(world)).backward()


def no_future(state, bucket):
    return bucket.buffer()


def no_tensor(state, bucket):
    future = torch.futures.Future()
    future.set_result(3)
    return future


def failing(state, bucket):
    future = torch.futures.Future()
    future.set_exception(KeyError("the hook's"))
    return future


def after_a_failed_average(world):
    model = Terms(1, 2)
    Reducer(model).register_comm_hook(None, failing)
    loss = model(own(world))
    with pytest.raises(KeyError, match="the hook's"):
        loss.backward()
    with pytest.raises(RuntimeError, match="interrupted"):
        model(own(world))
    model(own(world))


def gradient_that_goes(world):
    model = Terms(1, 2)
    model.p0.register_post_accumulate_grad_hook(lambda _: setattr(model.p1, "grad", None))
    Reducer(model)
    model(own(world)).backward()


def in_backward(world, act):
    model = Terms(1, 2)
    reducer = Reducer(model)
    model.p0.register_hook(lambda _: act(reducer))  # p1's gradient is ready before p0's
    model(own(world)).backward()


def joined(world, reduce="mean", **options):
    reducer = Reducer(Terms(1), reduce=reduce)
    with ddp.join(reducer, **options):
        for _ in range(2 + world.rank):
            reducer.module(1.0).backward()


def weight_in_join(world):
    model = ddp.DistributedDataParallel(Terms(1))
    with model.join():
        model.reducer.weight(2)


def skips_in_join(world):
    reducer = Reducer(Terms(1), skip_unused=True)
    with ddp.join(reducer):
        for _ in range(2 * world.rank):  # none on rank 0
            reducer.module(1.0).backward()


def two_kinds(world):
    """Declared sparse, and dense on a rank that uses it otherwise, too."""
    table = nn.Embedding(10, 2, sparse=True)
    Reducer(table)
    loss = table(torch.tensor([1])).sum()
    (loss + table.weight.sum() if world.rank == 1 else loss).backward()


def sparse_on_rank_1(world):
    model = nn.Sequential(nn.Linear(1, 1), nn.Embedding(4, 2, sparse=world.rank == 1))
    ddp.broadcast_parameters(model)


def cast_table(world):
    model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)})
    ddp.DistributedDataParallel(model, mixed_precision=_MixedPrecision(torch.bfloat16))


def graph_in_a_view(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    Reducer(model, gradient_as_bucket_view=True)
    model(torch.ones(2, 3)).square().mean().backward(create_graph=True)


def limited_rows(world, kind, frozen):
    model = nn.Sequential(kind(5, 3, max_norm=1.5, norm_type=1), nn.Linear(3, 3))
    model[0].weight.requires_grad_(not frozen)
    Reducer(model, ignore={"0.weight"}).remove()
    Reducer(model)


def holds(tensor, trains=True):
    model = nn.Linear(1, 1)
    model.p = nn.Parameter(tensor, requires_grad=trains)
    return model


def frozen(tensor):
    return holds(tensor, trains=False)


def computed():
    model = frozen(torch.zeros(2))
    model.p.add_(nn.Parameter(torch.ones(2)))
    return model


def in_inference_mode(world):
    with torch.inference_mode():
        Reducer(Terms(1))


def distributed(world):
    mesh = init_device_mesh("cpu", (world.world_size,))
    made(world, holds(distribute_tensor(torch.zeros(2), mesh, [Shard(0)])))


def register(reducer):
    reducer.register_comm_hook(None, no_future)


def made(world, module=None, **options):
    Reducer(nn.Linear(1, 1) if module is None else module, **options)


FROZEN = r"p1 became requires_grad=False on rank {rank} .* with find_unused_parameters=True"
THAWED = r"parameter p1 became requires_grad=True on rank {rank} .* make a new one"
SECOND = r"parameter p2 got a second gradient on rank {rank} "
EVERY = "straggler_every must be 1 or more averages, got %s$"
NOTHING = "no parameter that requires a gradient"
DIVIDES = 'reduce="sum" divides by nothing: leave it out'
BF16 = ddp.comm_hooks.bf16_compress_hook
JOIN = r"weight\(\) cannot be used inside join"
META = nn.Linear(3, 3, device="meta")
OVERLAPPING = torch.arange(5.0).as_strided((3, 3), (1, 1))
COO = torch.eye(3).to_sparse()
with warnings.catch_warnings(action="ignore"):  # torch calls both unfinished
    CSR = torch.eye(3).to_sparse_csr()
    NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
LAZY = nn.Module()
LAZY.p = nn.UninitializedParameter()
with torch.inference_mode():
    INFERENCE = nn.Linear(1, 1)
RANK = "rank must be 1 or more and start 0 or more, got"
KINDS = r"parameter weight is dense on ranks \[1\] and sparse on \[0\]"
SPARSE = "gradient of parameter p0 is sparse on rank {rank}, but its module does not"
ROWS = r"^parameter 0.weight belongs to an %s with max_norm=1.5(.|\n)*weight.renorm_\(1, 0, 1.5\)"
RANGE, TYPE, STATE = ValueError, TypeError, RuntimeError
NOT_SENT = r"p1 is not the same .* by up to 1\. Call ddp\.broadcast_parameters\(model\) on every"
# The error, its text, what provokes it, and with which arguments.
ERRORS = [
    (STATE, NOT_SENT, never_sent, {}),
    (STATE, NOT_SENT, never_sent, {"check_every": 2, "gradient_as_bucket_view": True}),
    (STATE, r"no gradient .* on rank {rank} for: 1\.weight", step_of_a_part, {}),
    (STATE, "stepped during backward on rank {rank}", step_during_backward, {}),
    (STATE, FROZEN, changed, {"change": lambda model: model.p1.requires_grad_(False)}),
    (STATE, THAWED, changed, {"change": nn.Module.requires_grad_, "frozen": True}),
    # A float32 bucket would round float64 gradients without a word.
    (STATE, r"parameter p0 became torch\.float64 on cpu", changed, {"change": nn.Module.double}),
    (STATE, "parameter p2 .* on rank {rank}", changed, {"change": set_p(2, 3)}),
    (STATE, "parameter p1 .* on rank {rank}", changed, {"change": set_p(1, 2)}),
    (STATE, "p1 was removed on rank {rank}", changed, {"change": lambda m: delattr(m, "p1")}),
    (STATE, "p0 was replaced on rank {rank}", changed, {"change": move_into_p0}),
    (STATE, "p2 was added on rank {rank}", changed, {"change": rename_and_add}),
    (STATE, "p1 was removed on rank", changed, {"change": lambda m: weight_norm(m, "p1", None)}),
    (STATE, SECOND, second_gradient, {}),
    (STATE, SECOND, second_gradient, {"bucket_cap_mb": 0}),
    (STATE, SECOND, second_gradient, {"bucket_cap_mb": 0, "in_no_sync": True}),
    (STATE, SPARSE, undeclared_sparse, {}),
    (TYPE, "must be callable, got 3", with_hook, {"hook": 3}),
    (
        STATE,
        "a comm hook: leave bf16_compress_hook out",
        with_hook,
        {"hook": BF16, "reduce": "sum"},
    ),
    (TYPE, "Future, no_future returned Tensor", with_hook, {"hook": no_future}),
    (TYPE, "must give a tensor, got int", with_hook, {"hook": no_tensor}),
    (STATE, "backward pass on rank {rank} was interrupted: ", after_a_failed_average, {}),
    (STATE, r"parameter p1 was taken away on rank \d before", gradient_that_goes, {}),
    (STATE, "cannot move into", in_backward, {"act": Reducer.keep_bucket_views}),
    (STATE, "cannot be registered while gradients", in_backward, {"act": register}),
    (STATE, "exhausted", joined, {"throw_on_early_termination": True}),
    (RANGE, DIVIDES, joined, {"reduce": "sum", "divide_by_initial_world_size": False}),
    (STATE, JOIN, weight_in_join, {}),
    (STATE, "skip_unused=True needs ranks that use the same", skips_in_join, {}),
    (STATE, KINDS, two_kinds, {}),
    (STATE, "rank 0 has parameter 1.weight: .*; rank 1 has .* sparse", sparse_on_rank_1, {}),
    (RANGE, r"table\.weight has a sparse gradient, which autograd", cast_table, {}),
    (STATE, r"parameter 2.bias .* gradient_as_bucket_view=False", graph_in_a_view, {}),
    (RANGE, RANK, lambda world: PowerSGDState(0, 1), {}),
    (RANGE, RANK, lambda world: PowerSGDState(1, -1), {}),
    (TYPE, "module must be a torch.nn.Module, got list", made, {"module": [nn.Linear(1, 1)]}),
    (RANGE, "weight is on the meta device .*to_empty", made, {"module": META}),
    (RANGE, "parameter p is expanded: .* clone", made, {"module": holds(torch.ones(1).expand(3))}),
    (RANGE, "parameter p is expanded: .* clone", made, {"module": holds(OVERLAPPING)}),
    (RANGE, "p has the layout torch.sparse_coo, .* `ignore`", made, {"module": holds(COO)}),
    (RANGE, "p has the layout torch.sparse_csr, .* `ignore`", made, {"module": frozen(CSR)}),
    (RANGE, "parameter p is nested, .* `ignore`", made, {"module": holds(NESTED)}),
    (RANGE, "parameter p is lazy .* one forward pass", made, {"module": LAZY}),
    (RANGE, "parameter p is not a leaf: .*detach", made, {"module": computed()}),
    (RANGE, "parameter weight was made under torch.inference_mode", made, {"module": INFERENCE}),
    (STATE, "cannot be made under torch.inference_mode", in_inference_mode, {}),
    (RANGE, "parameter p is a DTensor: .* `device_mesh`", distributed, {}),
    (RANGE, NOTHING, made, {"module": nn.ReLU()}),
    (RANGE, NOTHING, made, {"module": nn.Linear(1, 1).requires_grad_(False)}),
    (RANGE, "must be a number or a list, got 'auto'$", made, {"bucket_cap_mb": "auto"}),
    (
        RANGE,
        "positive number of seconds, None or 'auto', got 0$",
        made,
        {"stall_after": 0},
    ),
    (RANGE, "check_every must be 1 or more, got 0", made, {"check_every": 0}),
    (RANGE, 'reduce must be "mean" or "sum", got .max', made, {"reduce": "max"}),
    (RANGE, 'reduce="sum" cannot .* virtual', made, {"reduce": "sum", "virtual_ranks": 2}),
    (RANGE, "check_finite cannot .* virtual", made, {"check_finite": True, "virtual_ranks": 2}),
    (RANGE, EVERY % 0, made, {"straggler_every": 0}),
    (RANGE, "fuse_wgrad needs all parameters on a CPU", made, {"module": META, "fuse_wgrad": True}),
    (RANGE, ROWS % "Embedding", limited_rows, {"kind": nn.Embedding, "frozen": False}),
    (RANGE, ROWS % "EmbeddingBag", limited_rows, {"kind": nn.EmbeddingBag, "frozen": True}),
]
IDS = [f"{row[2].__name__}{number}" for number, row in enumerate(ERRORS)]


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=IDS)
@on("gloo-2")
def test_error(world, number):
    error, text, provoke, arguments = ERRORS[number]
    with pytest.raises(error, match=text.replace("{rank}", str(world.rank))):
        provoke(world, **arguments)


@on("pair")
def test_second_gradient_in_a_pass_within_the_pass(world):
    """On one rank: it raises when the other has what it waits for; both continue training."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    Reducer(model, bucket_cap_mb=0)
    x = torch.full((2, 3), world.rank + 1.0)

    def loss(inner):
        h = model[0](x)
        if inner:  # the last layer's bucket is launched before this pass within the pass
            h = checkpoint(lambda h: model[2](model[1](h)), h, use_reentrant=True)
        else:
            h = model[1](h)
        return model[2](h).sum()

    for _ in range(2):
        loss(False).backward()
        model.zero_grad()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"parameter 2.* got a second gradient on rank 0"):
            loss(True).backward()
    else:
        loss(False).backward()
    model.zero_grad()
    loss(False).backward()
    assert model[2].bias.grad.tolist() == [2.0] * 3


@on("gloo-3")
def test_refusing_what_is_no_weight(world):
    """If one rank's is wrong, all raise: the others would wait for gradients that never arrive."""
    model = Terms(1)
    for amount in (-1, math.nan, math.inf, 10**400, "many", "3", b"3", None):
        reducer = Reducer(model)
        loss = model(1.0)
        if world.rank == 1:
            got = re.escape(f"a weight must be 0 or more, and finite, got {amount!r};")
            with pytest.raises(ValueError, match=got):
                reducer.weight(amount)
        else:
            reducer.weight(1)
            with pytest.raises(ValueError, match="another rank's weight is negative or not finite"):
                loss.backward()
        reducer.remove()
    reducer = Reducer(model)
    reducer.weight(0)
    loss = model(1.0)
    with pytest.raises(ValueError, match="all ranks are 0"):
        loss.backward()
