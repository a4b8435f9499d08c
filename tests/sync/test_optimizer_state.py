"""One optimizer's state and settings on all ranks."""

import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

import ddp_from_scratch as ddp
from ddp_from_scratch import broadcast_optimizer_state
from tests.support.on_ranks import on
from tests.support.refusal import text_of

X = torch.ones(2, 3)
KINDS = [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("AdamW", {}), ("Muon", {})]
LIBRARIES = ["torch", "none", "node", "world"]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 3))


def make(kind, settings, library, **options):
    layers = model()
    groups = [{"params": [p for p in layers.parameters() if p.dim() == d]} for d in (2, 1)]
    if kind == "Muon":
        if library == "torch":
            return layers, torch.optim.Muon(groups[0]["params"], lr=0.125, **settings)
        groups[1]["use_muon"] = False
    options = {} if library == "torch" else {"reducer": ddp.Reducer(layers, **options)}
    if library in ("node", "world"):
        options["shard"] = library
    return layers, getattr(torch.optim if library == "torch" else ddp, kind)(
        groups, lr=0.125, **settings, **options
    )


def train(layers, optimizer, steps, library):
    for step in range(steps):
        optimizer.zero_grad()
        loss = layers(X * (step + 1)).square().mean()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in layers.parameters()])


def saved(kind, settings, library):
    """The state after two steps, and the parameters after two more."""
    layers, optimizer = make(kind, settings, library)
    train(layers, optimizer, 2, library)
    state = pickle.dumps((layers.state_dict(), optimizer.state_dict()))
    return state, train(layers, optimizer, 2, library)


@pytest.mark.parametrize("library", LIBRARIES)
@on("gloo-2")
def test_rank_1_alone_has_loaded_a_checkpoint(world, library):
    for kind, settings in KINDS[:-1] if library in ("node", "world") else KINDS:
        loaded_by_rank_1(world, kind, settings, library)


def loaded_by_rank_1(world, kind, settings, library, options=None):
    state, expected = saved(kind, settings, library)
    layers, optimizer = make(kind, settings, library, **(options or {}))
    weights, loaded = pickle.loads(state)
    layers.load_state_dict(weights)
    loaded["param_groups"][0]["lr"] = 0.5
    if world.rank == 1:
        optimizer.load_state_dict(loaded)
    broadcast_optimizer_state(optimizer, src=1)
    assert optimizer.param_groups[0]["lr"] == 0.5
    ddp.check_sync(layers, optimizers=[optimizer])
    optimizer.param_groups[0]["lr"] = 0.125
    assert torch.equal(train(layers, optimizer, 2, library), expected)
    ddp.check_sync(layers, optimizers=[optimizer])


@pytest.mark.parametrize("library", ["torch", "node", "world"])
@pytest.mark.parametrize("crew", ["mpi-2"], indirect=True)
def test_rank_1_alone_has_loaded_a_checkpoint_on_mpi(crew, library):
    crew(loaded_by_rank_1, *KINDS[2], library)


@on("gloo-2")
def test_shards_of_ranks_that_send_messages(world):
    loaded_by_rank_1(world, *KINDS[2], "world", {"shared_memory": False})


@pytest.mark.parametrize("library", LIBRARIES)
@on("gloo-2")
def test_what_rank_0_lacks_is_dropped_and_what_it_has_is_kept(world, library):
    layers, optimizer = make("SGD", {"momentum": 0.5}, library)
    layers.requires_grad_(True)
    expected = train(layers, optimizer, 1, library)
    if world.rank == 0:
        optimizer.state.clear()
    broadcast_optimizer_state(optimizer)
    assert not any(optimizer.state.values())
    # As if the first step, and not the second, had no momentum.
    twin = model()
    nn.utils.vector_to_parameters(expected, twin.parameters())
    plain = torch.optim.SGD(twin.parameters(), lr=0.125, momentum=0.5)
    reducer = ddp.Reducer(twin)
    assert torch.equal(train(layers, optimizer, 2, library), train(twin, plain, 2, "torch"))
    reducer.remove()


@on("gloo-3")
def test_state_of_every_kind(world):
    """A dtype that torch would cast, lists, numbers, strides, and a learning rate in a tensor."""
    layers = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)).bfloat16()
    weight = layers[0].weight
    optimizer = torch.optim.SGD(layers.parameters(), lr=torch.tensor(0.25 + world.rank))
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    values = values.to(memory_format=torch.channels_last)
    if world.rank == 2:
        optimizer.state[weight] = {
            "float32": values,
            "list": [torch.ones(5), (torch.zeros(2, dtype=torch.int64), None)],
            "number": 3,
            "sparse": torch.eye(2).to_sparse(),
        }
        optimizer.param_groups[0]["name"] = "convolutions"
        optimizer.state["of all"] = {"v": torch.full((4,), 3.0), "list": [torch.ones(5)]}
    broadcast_optimizer_state(optimizer, src=2)
    state = optimizer.state[weight]
    assert torch.equal(state["float32"], values)
    assert state["float32"].stride() == values.stride()
    assert state["list"][0].equal(torch.ones(5))
    assert state["list"][1][0].equal(torch.zeros(2, dtype=torch.int64))
    assert state["list"][1][1] is None
    assert state["number"] == 3
    assert optimizer.state["of all"]["v"].equal(torch.full((4,), 3.0))
    assert optimizer.state["of all"]["list"][0].equal(torch.ones(5))
    assert optimizer.param_groups[0]["name"] == "convolutions"
    assert optimizer.param_groups[0]["lr"].equal(torch.tensor(2.25))
    ddp.check_sync(layers, optimizers=[optimizer])


@on("gloo-2")
def test_state_of_a_mesh(world):
    mesh = init_device_mesh("cpu", (world.world_size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if world.rank == 0:
        moment = DTensor.from_local(torch.full((4, 2), 3.0), mesh, [Replicate()], run_check=False)
        optimizer.state[weight]["momentum_buffer"] = moment
    broadcast_optimizer_state(optimizer)
    assert optimizer.state[weight]["momentum_buffer"].to_local().eq(3).all()


def other_class(world, layers):
    return (torch.optim.SGD if world.rank else torch.optim.Adam)(layers.parameters())


def other_shape(world, layers):
    return torch.optim.SGD([layers[world.rank].weight])


def fewer(world, layers):
    return torch.optim.SGD([*layers.parameters()][: 4 - world.rank])


def more_groups(world, layers):
    groups = [{"params": layer.parameters()} for layer in layers]
    return torch.optim.SGD(groups[: 1 + world.rank])


def of_zero(world, layers):
    return ZeroRedundancyOptimizer(layers.parameters(), torch.optim.SGD, lr=0.1)


def unpicklable(world, layers):
    optimizer = torch.optim.SGD(layers.parameters())
    optimizer.state[layers[0].weight]["generator"] = (number for number in range(world.rank))
    return optimizer


class Unwilling:
    """Cannot be pickled, or cannot be unpickled."""

    def __init__(self, fails):
        self.fails = fails

    def __reduce__(self):
        if self.fails:
            raise ValueError("no\npickle")
        return Unwilling.made, ()

    @staticmethod
    def made():
        raise ValueError("not here")


def with_state(layers, value):
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    optimizer.state[layers[0].weight]["value"] = value
    return optimizer


def refuses_to_be_pickled(world, layers):
    return with_state(layers, Unwilling(True))


def refuses_to_be_unpickled(world, layers):
    return with_state(layers, Unwilling(False))


def round_in_a_circle(world, layers):
    value = []
    value.append(value)
    return with_state(layers, value)


def fails(*_):
    raise KeyError("mine")


def refuses_to_be_saved(world, layers):
    optimizer = with_state(layers, 1)
    if world.rank == 0:
        optimizer.register_state_dict_pre_hook(fails)
    return optimizer


def refuses_to_be_loaded(world, layers):
    optimizer = with_state(layers, 1)
    if world.rank == 1:
        optimizer.register_load_state_dict_pre_hook(fails)
    return optimizer


NOT_SENT = "the optimizer's state cannot be sent: rank 0 has "
NOT_LOADED = "the state of rank 0's optimizer cannot be loaded: rank 1 has "
REFUSED = [
    (other_class, "rank 0 has a torch.optim.adam.Adam; rank 1 has a torch.optim.sgd.SGD"),
    (other_shape, "rank 0 has a parameter of shape (40, 3) and torch.float32 in group 0; rank 1"),
    (fewer, "rank 0 has 4 parameters in group 0; rank 1 has 3 parameters in group 0"),
    (more_groups, "rank 0 has nothing more; rank 1 has 2 parameters in group 1"),
    (of_zero, "each rank has its own part of a ZeroRedundancyOptimizer's state"),
    (unpicklable, NOT_SENT + "TypeError: cannot pickle 'generator'"),
    (refuses_to_be_pickled, NOT_SENT + "ValueError: no pickle"),
    (round_in_a_circle, NOT_SENT + "RecursionError: "),
    (refuses_to_be_saved, NOT_SENT + "KeyError: 'mine'"),
    (refuses_to_be_unpickled, NOT_LOADED + "ValueError: not here"),
    (refuses_to_be_loaded, NOT_LOADED + "KeyError: 'mine'"),
]


def refused(world):
    texts = []
    for program, _ in REFUSED:
        error = ValueError if program is of_zero else RuntimeError
        own = dist.new_group(timeout=timedelta(seconds=20))
        texts.append(text_of(error, broadcast_optimizer_state, program(world, model()), 0, own))
    group = dist.new_group()
    _, optimizer = make(*KINDS[0], "torch")
    texts.append(text_of(ValueError, broadcast_optimizer_state, optimizer, 2, group))
    return texts


def test_unlike_optimizers_are_refused_with_one_text_on_every_rank(ranks):
    one, other = ranks("gloo", 2)(refused)
    assert one == other
    for (_, expected), text in zip(REFUSED, one, strict=False):
        assert expected in text
    assert one[-1] == "src must be a rank of the group, 0 to 1, got 2"
