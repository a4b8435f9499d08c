"""Weight gradients computed into their buckets: the same bits, and torch's way where it must be."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ddp_from_scratch as ddp
from ddp_from_scratch.common.memory import same_memory
from ddp_from_scratch.options import fused_wgrad
from tests.support.terms import as_large

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def all_sizes():
    with as_large():
        yield


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(24, 40, dtype=dtype)
        self.second = nn.Linear(40, 7, bias=False, dtype=dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def watched(model):
    """Whether each gradient arrived in its window, by name."""
    reducer, arrived = None, {}

    def note(name, parameter):
        buckets = [(b.parameters(), b.views) for b in reducer.core.flat_buckets]
        windows = {id(p): view for found in buckets for p, view in zip(*found, strict=True)}
        arrived[name] = same_memory(parameter.grad, windows[id(parameter)])

    # Before the Reducer's own hooks, which pack.
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    return arrived


def beside_torch(make, run):
    models = []
    for _ in "12":
        torch.manual_seed(0)
        models.append(make())
    arrived = watched(models[0])
    for step in range(3):  # the windows hold the gradients of the step before
        found = []
        for net in models:
            torch.manual_seed(step)
            net.zero_grad()
            inputs = run(net) or []
            found.append([t.grad for t in (*net.parameters(), *inputs)])
        assert all(map(torch.equal, *found))
    return arrived


def rows(*shape):
    def run(net):
        x = torch.randn(shape, dtype=net.second.weight.dtype, requires_grad=True)
        net(x).pow(2).sum().backward()
        return [x]

    return run


def look_up(net):
    net(TOKENS).tanh().sum().backward()


TOKENS = torch.tensor([[5, 0, 5, 5], [10, 5, 0, 0]])


LAYERS = {
    "one row": rows(1, 24),
    "rows": rows(9, 24),
    "three dimensions": rows(3, 5, 24),
    "no rows": rows(0, 24),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_have_torchs_bits_and_arrive_in_their_windows(name, dtype):
    arrived = beside_torch(partial(Net, dtype), LAYERS[name])
    assert set(arrived.values()) == {True}


X = torch.linspace(-1, 1, 5 * 24).view(5, 24)


def hooked():
    model = Net()
    model.first.weight.register_hook(lambda gradient: None)
    return model


def in_autocast(net):
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(X).sum()
    loss.backward()


def complex_numbers(net):
    net(X * (1 + 2j)).abs().pow(2).sum().backward()


def whole(net):
    net(X).tanh().sum().backward()


def accumulated(net):
    net.first.weight.grad = torch.ones_like(net.first.weight)
    net(X).sum().backward()


OTHERS = {
    "an embedding": (partial(nn.Embedding, 11, 24), look_up),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(24, 24)), whole),
    "hooked": (hooked, rows(5, 24)),
    "autocast": (Net, in_autocast),
    "complex": (partial(nn.Linear, 24, 24, dtype=torch.complex64), complex_numbers),
    "accumulated": (Net, accumulated),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_gradients_take_memory_of_their_own(name):
    make, run = OTHERS[name]
    arrived = beside_torch(make, run)
    assert not arrived.get("first.weight", any(arrived.values()))


def fused(model, inputs):
    ddp.Reducer(model, fuse_wgrad=True)
    model(inputs).sum().backward()
    model.zero_grad()
    return model


def test_another_tensor_in_a_weights_place_and_a_weight_that_changes():
    """The one gets a gradient of its own; the other may change where backward does not read it."""
    model, other = fused(nn.Linear(24, 24, bias=False), X), torch.ones(24, 24, requires_grad=True)
    torch.func.functional_call(model, {"weight": other}, (X,)).square().sum().backward()
    kept = other.grad.clone()
    loss = model(X).sum()
    with torch.no_grad():
        model.weight.zero_()
    loss.backward()
    assert model.weight.grad.any()
    assert torch.equal(other.grad, kept)


def test_torch_autograd_grad_gets_tensors_of_its_own():
    model = fused(Net(), X)
    (mine,) = torch.autograd.grad(model(X).sum(), [model.first.weight])
    kept = mine.clone()
    model(3 * X).sum().backward()
    assert torch.equal(mine, kept)


def test_other_and_small_layers_keep_their_forward(monkeypatch):
    class OwnLinear(nn.Linear):
        pass

    monkeypatch.setattr(fused_wgrad, "_MIN_FUSED_NUMEL", 2**16)
    others = [nn.Linear(255, 257), nn.Embedding(256, 1024), OwnLinear(257, 256)]
    parametrized = parametrizations.weight_norm(nn.Linear(257, 256))
    model = nn.Sequential(nn.Linear(257, 256), *others, parametrized)
    ddp.Reducer(model, fuse_wgrad=True)
    assert ["forward" in vars(layer) for layer in model] == [True] + [False] * 4


def test_copies_have_torchs_forward_and_remove_gives_it_back():
    model = Net()
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.first.forward.__self__ is made.first
        made(X).sum().backward()
        assert made.first.weight.grad is not None
    assert model.first.weight.grad is None
    late = model(X).sum()
    reducer.remove()
    assert "forward" not in vars(model.first)
    before = reducer.core.flat_buckets[0].buffer().clone()
    late.backward()
    assert torch.equal(reducer.core.flat_buckets[0].buffer(), before)


def test_a_pass_that_fails_leaves_no_claim():
    model = Net()
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    fails = model.first.bias.register_hook(lambda gradient: {}[0])  # its window is claimed then
    with pytest.raises(KeyError):
        model(X).sum().backward()
    fails.remove()
    reducer.remove()
    model.zero_grad()
    arrived = watched(model)
    model(X).sum().backward()
    assert all(arrived.values())


class Same(nn.Module):
    """A parametrization that gives the layer its own weight back."""

    def forward(self, weight):
        return weight


def test_a_parametrization_that_returns_its_input_is_left_to_torch():
    net = Net()
    ddp.Reducer(net, fuse_wgrad=True)
    nn.utils.parametrize.register_parametrization(net.first, "weight", Same())
    net(torch.ones(2, 24)).sum().backward()
    assert net.first.parametrizations.weight.original.grad is not None
