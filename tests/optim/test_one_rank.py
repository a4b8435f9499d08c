"""A shard of one rank is no shard: nothing moves until there are more. Bits stay those of torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.optim import muon
from ddp_from_scratch.optim.flat_params import FlatParams
from ddp_from_scratch.optim.forward_waits import ForwardWaits
from ddp_from_scratch.optim.shards import NodeShards, WorldShards
from ddp_from_scratch.optim.update_rules import AdamRule

SHARDS = ["none", "node", "world"]
KINDS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.1}}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_shard = pytest.mark.parametrize("shard", SHARDS)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 1))


def made(kind, shard="none", **options):
    model = layers()
    reducer = ddp.Reducer(model, bucket_cap_mb=0.001, **options)
    optimizer = getattr(ddp, kind)(model.parameters(), reducer=reducer, shard=shard, **KINDS[kind])
    return model, reducer, optimizer


def torchs(kind):
    model = layers()
    # Not fused SGD, which rounds the momentum of the last elements differently.
    settings = KINDS[kind] | ({"fused": True} if kind == "AdamW" else {})
    return model, getattr(torch.optim, kind)(model.parameters(), **settings)


def loss(model, number):
    torch.manual_seed(number)
    return model(torch.randn(8, 16)).square().mean()


def train(model, optimizer, numbers, at_once=False):
    for number in numbers:
        optimizer.zero_grad()
        if at_once:
            optimizer.backward_and_step(loss(model, number))
        else:
            loss(model, number).backward()
            optimizer.step()


def never(*_, **__):
    raise AssertionError("one rank has nothing to divide, to move or to wait for")


def equal(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("at_once", [False, True], ids=["two calls", "one call"])
@each_shard
@each_kind
def test_nothing_moves(alone, kind, shard, at_once, monkeypatch):
    for owner, name in (
        (FlatParams, "__init__"),
        (NodeShards, "end_step"),
        (WorldShards, "end_step"),
        (dist, "all_reduce"),
        (dist, "all_gather_into_tensor"),
    ):
        monkeypatch.setattr(owner, name, never)
    model, _, optimizer = made(kind, shard)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    train(model, optimizer, range(3), at_once)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    reference, its = torchs(kind)
    train(reference, its, range(3))
    assert equal(model, reference)
    kept = [parameter.grad is not None for parameter in model.parameters()]
    assert kept == [shard == "none" or not at_once] * 4


def test_one_call_steps_a_group(alone, monkeypatch):
    model, _, optimizer = made("AdamW")
    train(model, optimizer, range(2))
    calls = []
    rule = type(optimizer._rule)
    original = rule.update_flat
    monkeypatch.setattr(rule, "update_flat", lambda *a: [calls.append(len(a[1][0])), original(*a)])
    train(model, optimizer, range(2))
    assert calls == [4, 4]


def test_no_read_waits_for_a_parameter(alone, monkeypatch):
    monkeypatch.setattr(ForwardWaits, "__init__", never)
    model = layers()
    options = {"reducer": ddp.Reducer(model), "shard": "world", "overlap_forward": True}
    train(model, ddp.SGD(model.parameters(), lr=0.1, **options), range(2), at_once=True)


@each_shard
@each_kind
def test_a_comm_hook_moves_parameters_and_without_it_they_stay(alone, kind, shard):
    """Three steps without the hook, three with it, three without, and the state is kept."""
    model, reducer, optimizer = made(kind, shard)
    reference, its = torchs(kind)
    places = []
    for turn, hook in enumerate((None, ddp.comm_hooks.allreduce_hook, ddp.comm_hooks.average)):
        if hook is not None:
            reducer.register_comm_hook(None, hook)
        numbers = range(3 * turn, 3 * turn + 3)
        train(model, optimizer, numbers)
        train(reference, its, numbers)
        assert equal(model, reference)
        places.append([parameter.data_ptr() for parameter in model.parameters()])
    assert places[0] != places[1] == places[2]
    ours, theirs = optimizer.state_dict()["state"], its.state_dict()["state"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_muon_sends_nothing_and_steps_the_rest_in_one_call(alone, monkeypatch):
    monkeypatch.setattr(muon, "divide", never)
    monkeypatch.setattr(AdamRule, "step", never)
    model, reference = layers(), layers()
    ours, theirs = (
        [
            [p for p in each.parameters() if (p.ndim == 2) == is_matrix]
            for is_matrix in (True, False)
        ]
        for each in (model, reference)
    )
    groups = [{"params": ours[0], "lr": 0.02}, {"params": ours[1], "lr": 0.1, "use_muon": False}]
    reducer = ddp.Reducer(model)
    optimizer = ddp.Muon(groups, reducer=reducer, ns_dtype=torch.bfloat16)
    train(model, optimizer, range(3))
    its = torch.optim.Muon(theirs[0], lr=0.02), torch.optim.AdamW(theirs[1], lr=0.1, fused=True)
    for number in range(3):
        reference.zero_grad()
        loss(reference, number).backward()
        for each in its:
            each.step()
    assert equal(model, reference)


@each_shard
def test_the_norm_and_the_step_have_the_bits_of_those_in_flat_tensors(alone, shard):
    norms, models = [], []
    for flat in (False, True):
        model, reducer, optimizer = made("SGD", "none" if flat else shard)
        if flat:
            reducer.register_comm_hook(None, ddp.comm_hooks.allreduce_hook)
        for number in range(3):
            optimizer.zero_grad()
            norms.append(optimizer.backward_and_step(loss(model, number), max_norm=0.01))
        models.append(model)
    assert torch.stack(norms[:3]).equal(torch.stack(norms[3:]))
    assert equal(*models)


@each_shard
def test_a_state_that_does_not_fit_is_refused(alone, shard):
    model, _, optimizer = made("AdamW", shard)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(33, 16)
    with pytest.raises(ValueError, match="has momentum_buffer and lacks step, exp_avg, exp_avg_sq"):
        train(model, optimizer, range(1))
    model, _, optimizer = made("SGD", shard)
    train(model, optimizer, range(1))
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(16, 33)
    with pytest.raises(ValueError, match=r"momentum_buffer .* has shape \(16, 33\)"):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("shard", ["node", "world"])
def test_every_rank_must_step_its_share_even_of_one(alone, shard):
    model, reducer, optimizer = made("SGD", shard)
    with pytest.raises(RuntimeError, match=r"join\(\) cannot be used"), ddp.join(reducer):
        train(model, optimizer, range(1))


@each_kind
def test_a_frozen_parameter_and_one_without_a_gradient_keep_their_state(alone, kind):
    model, _, optimizer = made(kind, find_unused_parameters=True)
    reference, its = torchs(kind)
    for one, stepper in ((model, optimizer), (reference, its)):
        train(one, stepper, range(2))
        one[0].requires_grad_(False)
        train(one, stepper, range(2, 4))
        one[0].requires_grad_(True)
        train(one, stepper, range(4, 6))  # Adam's ages differ
    assert equal(model, reference)
    torch.testing.assert_close(optimizer.state_dict()["state"], its.state_dict()["state"])


def grown(world, kind, folder, shard="none"):
    """Trains alone, and then with another rank in a new default group."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model, _, optimizer = made(kind, shard)
    train(model, optimizer, range(3))
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=world.rank, world_size=2, store=store)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    if shard != "none":
        with pytest.raises(RuntimeError, match="the Reducer averages in another one now"):
            train(model, optimizer, range(3, 6))
        return
    train(model, optimizer, range(3, 6))
    moved = places != [parameter.data_ptr() for parameter in model.parameters()]
    reference, its = torchs(kind)
    train(reference, its, range(6))
    return moved, equal(model, reference)


@pytest.mark.timeout(60)
@each_kind
def test_parameters_and_state_move_when_there_are_two_ranks(ranks, kind, tmp_path):
    assert ranks("gloo", 2, fresh=True)(grown, kind, tmp_path) == [(True, True)] * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shard", ["node", "world"])
def test_shards_belong_to_their_group(ranks, shard, tmp_path):
    ranks("gloo", 2, fresh=True)(grown, "SGD", tmp_path, shard)
