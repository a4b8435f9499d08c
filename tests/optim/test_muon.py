"""Muon with divided work beside torch's on every rank: the same bits, on any number of ranks."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.optim import muon
from ddp_from_scratch.optim.muon import cost, divide, orthogonalize
from tests.support.on_ranks import on

SHAPES = [(8, 8), (3, 17), (40, 5), (24, 24), (1, 6), (64, 2)]
VIRTUAL_RANKS = 4
LOST = ddp.CommunicationError("a rank was lost")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.vectors = nn.ParameterList(torch.randn(n) for n in (7, 30))

    def forward(self, x):
        return sum((p * x + p * p * k).sum() for k, p in enumerate(self.parameters()))


def groups(model, **settings):
    return [
        {"params": model.matrices[:3], "lr": 0.02, **settings},
        {"params": model.vectors, "use_muon": False, "lr": 3e-3, "betas": (0.8, 0.9)},
        {"params": model.matrices[3:], "momentum": 0.5, "nesterov": False, "ns_steps": 3},
    ]


def ours(model, reducer=None, **settings):
    reducer = reducer or ddp.Reducer(model)
    return ddp.Muon(groups(model, **settings), reducer=reducer, ns_dtype=torch.bfloat16)


def torchs(model, **settings):
    """torch.optim.Muon, and torch.optim.AdamW for the group in the middle."""
    first, adamw, second = groups(model, **settings)
    del adamw["use_muon"]
    return torch.optim.Muon([first, second]), torch.optim.AdamW([adamw], fused=True)


def train(model, optimizers, steps, rank=0):
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(0.1 * (rank + 1) + step).backward()
        for optimizer in optimizers:
            optimizer.step()


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


every_crew = pytest.mark.parametrize("crew", ["gloo-1", "gloo-3", "mpi-2"], indirect=True)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@every_crew
@on("crew")
def test_bits_are_those_of_torch_on_every_rank(world, adjust):
    models = [Net(), Net()]
    reducers = [ddp.Reducer(model) for model in models]
    optimizer = ours(models[0], reducers[0], adjust_lr_fn=adjust)
    train(models[0], [optimizer], 4, world.rank)
    theirs = torchs(models[1], adjust_lr_fn=adjust)
    train(models[1], theirs, 4, world.rank)
    assert same(*models)
    state = {**theirs[0].state, **theirs[1].state}
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert optimizer.state[p].keys() == state[q].keys()
        assert all(torch.equal(optimizer.state[p][name], state[q][name]) for name in state[q])
    ddp.check_sync(models[0], optimizers=[optimizer])


def part(state, use_muon):
    """The groups of one kind, and their state."""
    chosen = [group for group in state["param_groups"] if group["use_muon"] == use_muon]
    keys = {key for group in chosen for key in group["params"]}
    return {"param_groups": chosen, "state": {key: state["state"][key] for key in keys}}


@on("gloo-2")
def test_state_goes_to_torchs_classes_and_back(world):
    models = [Net(), Net()]
    reducers = [ddp.Reducer(model) for model in models]
    optimizer = ours(models[0], reducers[0])
    train(models[0], [optimizer], 2, world.rank)
    models[1].load_state_dict(models[0].state_dict())
    theirs = torchs(models[1], lr=7.0)  # the state has the right one
    for one, use_muon in zip(theirs, (True, False), strict=True):
        one.load_state_dict(copy.deepcopy(part(optimizer.state_dict(), use_muon)))
    train(models[0], [optimizer], 1, world.rank)
    train(models[1], theirs, 1, world.rank)
    assert same(*models)
    # Back, from groups that have never been in this class, and whole into another of this class.
    fresh = Net()
    fresh_reducer = ddp.Reducer(fresh)
    other = torch.optim.Muon(groups(fresh)[::2])
    train(fresh, [other], 1, world.rank)
    matrices = groups(fresh)[::2]
    again = ddp.Muon(matrices, lr=7.0, reducer=fresh_reducer, ns_dtype=torch.bfloat16)
    again.load_state_dict(other.state_dict())
    twin, its = copy.deepcopy((fresh, other))
    ddp.Reducer(twin)
    train(fresh, [again], 1, world.rank)
    train(twin, [its], 1, world.rank)
    assert same(fresh, twin)
    with pytest.raises(ValueError, match=r"use_muon=\[True, True\], the optimizer \[True, False"):
        optimizer.load_state_dict(other.state_dict())


@on("gloo-2")
def test_a_copy_and_a_step_in_join_need_no_other_rank(world):
    model = Net()
    reducer = ddp.Reducer(model)
    optimizer = ours(model, reducer)
    train(model, [optimizer], 2, world.rank)
    optimizer.zero_grad()
    model(world.rank).backward()
    alone, its = copy.deepcopy((model, optimizer))
    for parameter, averaged in zip(alone.parameters(), model.parameters(), strict=True):
        parameter.grad = averaged.grad.clone()
    if world.rank == 0:
        its.step()
    optimizer.step()
    assert world.rank or same(alone, model)
    with ddp.join(reducer):
        train(model, [optimizer], 2 + world.rank)
    ddp.check_sync(model)


@on("gloo-2")
def test_a_step_that_loses_a_rank_changes_nothing(world):
    models = [Net(), Net()]
    optimizers = [ours(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, [optimizer], 1, world.rank)
        optimizer.zero_grad()
        model(world.rank).backward()
    state = copy.deepcopy(optimizers[0].state_dict()["state"])
    with patch.object(muon, "wait", side_effect=LOST), pytest.raises(ddp.CommunicationError):
        optimizers[0].step()
    torch.testing.assert_close(optimizers[0].state_dict()["state"], state, rtol=0, atol=0)
    assert same(*models)
    for optimizer in optimizers:
        optimizer.step()
    assert same(*models)


@on("gloo-2")
def test_a_step_that_loses_a_rank_can_be_dropped_with_its_buffers(world):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    reducer = ddp.Reducer(model, virtual_ranks=2)
    optimizer = ddp.Muon([model[0].weight], reducer=reducer)
    with reducer.virtual_rank(world.rank):
        model(torch.ones(2, 4)).sum().backward()
    assert model[1].num_batches_tracked == 1
    with patch.object(muon, "wait", side_effect=LOST), pytest.raises(ddp.CommunicationError):
        optimizer.step()
    reducer.abort_step()
    assert model[1].num_batches_tracked == 0


def trained(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Linear(16, 3))
    reducer = ddp.Reducer(model, virtual_ranks=VIRTUAL_RANKS)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = ddp.Muon(matrices, lr=0.02, reducer=reducer)
    batches = torch.randn(3, VIRTUAL_RANKS, 5, 12)
    for batch in batches:
        optimizer.zero_grad()
        for index in reducer.virtual_rank_range:
            with reducer.virtual_rank(index):
                model(batch[index]).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


def test_virtual_ranks_have_the_same_bits_on_any_number_of_ranks(ranks):
    (alone,) = ranks("gloo", 1)(trained)
    assert all(found == alone for size in (2, 3) for found in ranks("gloo", size)(trained))


def test_orthogonalized_rows_are_orthogonal_and_float32_rounds_little():
    settings = (3.4445, -4.7750, 2.0315), 5, 1e-7
    generator = torch.Generator().manual_seed(1)
    for shape in [*SHAPES, (128, 512)]:
        matrix = torch.randn(sorted(shape), generator=generator)
        exact = orthogonalize(matrix, torch.float64, *settings)
        values = torch.linalg.svdvals(exact)
        assert (values.min() > 0.6, values.max() < 1.3) == (True, True)
        # The same singular vectors: their product with the matrix's own is positive definite.
        assert torch.linalg.eigvals(exact @ matrix.double().T).real.min() > 0
        for dtype, least, most in ((torch.float32, 0, 1e-5), (torch.bfloat16, 1e-5, 0.1)):
            found = orthogonalize(matrix, dtype, *settings).double()
            assert least < (found - exact).norm() / exact.norm() < most


def test_owners_have_about_the_same_cost():
    assert divide([8, 5, 4, 3, 1], 2) == [0, 1, 1, 0, 1]
    assert divide([1, 3, 4, 5, 8], 2) == [1, 0, 1, 1, 0]
    assert divide([3, 2, 1], 5) == [0, 1, 2]
    assert divide([], 2) == []
    assert cost((3, 17)) == cost((17, 3)) == 3 * 3 * 17 + 3 * 3 * 3 + 3 * 3 * 17


WRONG = [
    ({"momentum": -1.0}, ValueError, "momentum should be >= 0 but is: -1.0"),
    ({"ns_coefficients": (1.0, 2.0)}, ValueError, r"must be three numbers, got \(1.0, 2.0\)"),
    ({"foreach": True}, TypeError, "Muon takes no foreach: it has one kernel"),
    ({"use_muon": False, "betas": (2, 0)}, ValueError, "Invalid beta"),
]


@on("gloo-2")
def test_wrong_settings_and_parameters_are_refused(world):
    model = Net()
    reducer = ddp.Reducer(model)
    for settings, kind, told in WRONG:
        with pytest.raises(kind, match=told):
            ddp.Muon([{"params": model.matrices, **settings}], reducer=reducer)
    with pytest.raises(ValueError, match=r"real matrices, got a parameter of shape \(7,\)"):
        ddp.Muon(model.vectors, reducer=reducer)
    with pytest.raises(ValueError, match=r"shape \(8, 8\) is not one of the reducer's"):
        ddp.Muon(Net().matrices, reducer=reducer)
    with pytest.raises(ValueError, match=r"ns_dtype must be one of .* got torch.float16"):
        ddp.Muon(model.matrices, reducer=reducer, ns_dtype=torch.float16)
    optimizer = ddp.Muon(model.matrices, reducer=reducer, ns_dtype=muon.DTYPES[world.rank])
    complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"complex64: give it"):
        optimizer.add_param_group({"params": complex_, "use_muon": False})
    assert len(optimizer.param_groups) == 1
    model(1.0).backward()
    with pytest.raises(RuntimeError, match=r"float32 on some ranks and torch.bfloat16 on others"):
        optimizer.step()
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = ddp.Muon(table.parameters(), reducer=ddp.Reducer(table))
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="takes no sparse gradients"):
        optimizer.step()


@on("gloo-2")
def test_refuses_settings_that_are_not_those_of_the_other_ranks(world):
    changes = ["lr", "momentum", "weight_decay", "eps"]
    for name in changes:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = {"params": [p for p in model.parameters() if p.ndim == 1], "use_muon": False}
        optimizer = ddp.Muon([{"params": matrices}, others], lr=0.125, reducer=reducer)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        if world.rank:
            optimizer.param_groups[name == "eps"][name] = 0.5  # of Muon, or of AdamW
        model(torch.ones(2, 4)).square().sum().backward()
        text = rf"rank 0 has lr=0.125.*rank 1 has .*{name}=0.5.*: give the same on all"
        with pytest.raises(RuntimeError, match=text):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        reducer.remove()


@on("gloo-2")
def test_state_that_does_not_fit_is_refused(world):
    model = nn.Linear(4, 3)
    reducer = ddp.Reducer(model)
    others = {"params": [model.bias], "use_muon": False}
    optimizer = ddp.Muon([{"params": [model.weight]}, others], lr=0.125, reducer=reducer)
    saved = optimizer.state_dict()
    saved["param_groups"][1].pop("betas")
    with pytest.raises(ValueError, match="lacks betas: groups with use_muon=False are those of"):
        optimizer.load_state_dict(saved)
    wrong = r"\(3, 4\) has shape \(4, 3\)"
    for parameter, text in ((model.weight, wrong), (model.bias, "lacks step")):
        optimizer.state.clear()
        key = "momentum_buffer" if parameter is model.weight else "exp_avg"
        optimizer.state[parameter][key] = torch.ones(4, 3)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ValueError, match=text):
            optimizer.step()
    reducer.remove()


def test_iterations_run_in_bfloat16_where_hardware_multiplies_it():
    assert muon.fastest_dtype(torch.device("cuda")) == torch.bfloat16
    for capabilities, dtype in (({"amx_bf16": True}, torch.bfloat16), ({}, torch.float32)):
        with patch.object(torch.cpu, "get_capabilities", lambda found=capabilities: found):
            assert muon.fastest_dtype(torch.device("cpu")) == dtype
