"""Weight gradients computed into their buckets: the same bits, and torch's way where it must be."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import ddp_from_scratch as ddp
from ddp_from_scratch.autograd import fused_wgrad

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    monkeypatch.setattr(fused_wgrad, "_WORTH", 0)
    monkeypatch.setattr("ddp_from_scratch.buckets.packing._SMALL", 0)


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(24, 40, dtype=dtype)
        self.second = nn.Linear(40, 7, bias=False, dtype=dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def in_bucket(reducer, parameter):
    """True if the parameter's `.grad` lies in its window."""
    for bucket in reducer.flat_buckets:
        for member, view in zip(bucket.parameters(), bucket.views, strict=True):
            if member is parameter:
                return parameter.grad.data_ptr() == view.data_ptr()
    raise AssertionError("no bucket has it")


def watched(model):
    """The Reducer, and by name whether each gradient arrived in its window."""
    arrived = {}
    reducer = None

    def note(name, parameter):
        arrived[name] = in_bucket(reducer, parameter)

    # Before the Reducer's own hooks, which pack.
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    return reducer, arrived


SHAPES = {
    "one row": (1, 24),
    "rows": (9, 24),
    "three dimensions": (3, 5, 24),
    "no batch": (24,),
    "no rows": (0, 24),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_have_torchs_bits_and_arrive_in_their_windows(shape, dtype):
    model = Net(dtype)
    theirs = copy.deepcopy(model)
    _, arrived = watched(model)
    for step in range(3):
        torch.manual_seed(step)
        x, y = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
        y.data.copy_(x)
        for net, inputs in ((model, x), (theirs, y)):
            net.zero_grad()
            net(inputs).pow(2).sum().backward()
        assert torch.equal(x.grad, y.grad)
        for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(ours.grad, other.grad)
    assert arrived == dict.fromkeys(("first.weight", "first.bias", "second.weight"), True)


def test_a_second_gradient_of_a_weight_is_added():
    model = Net()
    model.third = nn.Linear(24, 40, bias=False)
    model.third.weight = model.first.weight
    theirs = copy.deepcopy(model)
    ddp.Reducer(model, fuse_wgrad=True)
    for net in (model, theirs):
        torch.manual_seed(1)
        x = torch.randn(5, 24)
        (net(x) + net(2 * x) + net.second(net.third(x))).pow(2).sum().backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_gradients_are_accumulated_in_their_windows():
    model = Net()
    theirs = copy.deepcopy(model)
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    for part in range(4):
        torch.manual_seed(part)
        x = torch.randn(5, 24)
        with reducer.no_sync() if part < 3 else nullcontext():
            model(x).sum().backward()
        theirs(x).sum().backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


X = torch.linspace(-1, 1, 5 * 24).view(5, 24)


def by_a_hook(model):
    model.first.weight.register_hook(lambda gradient: None)
    model(X).sum().backward()


def by_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(X).sum()
    loss.backward()


def by_accumulation(model):
    model.first.weight.grad = torch.ones_like(model.first.weight)
    model(X).sum().backward()


@pytest.mark.parametrize("run", [by_a_hook, by_autocast, by_accumulation])
def test_other_gradients_take_memory_of_their_own(run):
    model = Net()
    theirs = copy.deepcopy(model)
    _, arrived = watched(model)
    run(model)
    run(theirs)
    assert not arrived["first.weight"]
    torch.testing.assert_close(model.first.weight.grad, theirs.first.weight.grad)


def test_torch_autograd_grad_gets_tensors_of_its_own():
    model = Net()
    ddp.Reducer(model, fuse_wgrad=True)
    model(X).sum().backward()  # the buckets get their final layout
    model.zero_grad()
    (mine,) = torch.autograd.grad(model(X).sum(), [model.first.weight])
    kept = mine.clone()
    model(3 * X).sum().backward()
    assert torch.equal(mine, kept)
    # And with respect to the inputs alone no window is touched.
    before = model.first.weight.grad.clone()
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), [x])
    assert torch.equal(model.first.weight.grad, before)


def test_gradients_of_gradients():
    model = Net()
    theirs = copy.deepcopy(model)
    ddp.Reducer(model, fuse_wgrad=True)
    found = []
    for net in (model, theirs):
        gradients = torch.autograd.grad(net(X).pow(2).sum(), net.parameters(), create_graph=True)
        found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), net.first.weight))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_accumulated_gradients():
    model = Net()
    theirs = copy.deepcopy(model)
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    for net in (model, theirs):
        with reducer.no_sync():
            net(X).pow(2).sum().backward(create_graph=True)
            net.first.weight.grad.pow(2).sum().backward()
    torch.testing.assert_close(model.second.weight.grad, theirs.second.weight.grad)


def test_a_gradient_that_is_ready_or_under_way_is_not_overwritten():
    model = Net()
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    ((second, *_),) = (bucket.layout.members for bucket in reducer.flat_buckets)
    windows = []
    model.first.weight.register_hook(lambda _: windows.append(reducer._claim(second)))
    assert reducer._claim(second) is not None
    model(X).sum().backward()
    assert windows == [None]


def test_transforms_of_torch_func():
    model = Net()
    ddp.Reducer(model, fuse_wgrad=True)
    parameters = dict(model.named_parameters())

    def loss(values, x):
        return torch.func.functional_call(model, values, (x,)).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)
    assert each["first.weight"].shape == (5, 40, 24)


class OwnLinear(nn.Linear):
    pass


def test_other_layers_keep_their_forward():
    model = nn.Sequential(OwnLinear(3, 3), parametrizations.weight_norm(nn.Linear(3, 3)))
    model.append(nn.Linear(3, 3))
    own = model[2].forward = lambda x: x @ model[2].weight.T + model[2].bias
    ddp.Reducer(model, fuse_wgrad=True)
    assert "forward" not in vars(model[0])
    assert "forward" not in vars(model[1])
    assert model[2].forward is own
    model(torch.ones(2, 3)).sum().backward()


def test_small_layers_keep_their_forward(monkeypatch):
    monkeypatch.setattr(fused_wgrad, "_WORTH", 2**16)
    model = nn.Sequential(nn.Linear(255, 257), nn.Linear(257, 256))
    ddp.Reducer(model, fuse_wgrad=True)
    assert ["forward" in vars(layer) for layer in model] == [False, True]


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
    late.backward()
    assert not in_bucket(reducer, model.first.weight)


def test_parameters_elsewhere_are_refused():
    with pytest.raises(ValueError, match="fuse_wgrad needs all parameters on a CPU"):
        ddp.Reducer(nn.Linear(3, 3, device="meta"), fuse_wgrad=True)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise KeyError("an error in backward")


def test_a_pass_that_fails_leaves_no_claim():
    """`second` gets its gradient, `first` has claimed its window: then the pass fails."""
    model = Net()
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    x = X.clone().requires_grad_()
    with pytest.raises(KeyError):
        model(Fails.apply(x)).sum().backward()
    reducer.remove()
    model.zero_grad()
    reducer, arrived = watched(model)
    model(X).sum().backward()
    assert all(arrived.values())


def beside_torch(world, optimizer):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(24, 300), nn.ReLU(), nn.Linear(300, 7))
    model = DistributedDataParallel(copy.deepcopy(ours))
    reducer = ddp.Reducer(ours, fuse_wgrad=True)
    settings = {"lr": 1e-4, "momentum": 0.9}
    stepper = getattr(ddp, optimizer)(ours.parameters(), reducer=reducer, **settings)
    theirs = torch.optim.SGD(model.parameters(), **settings)
    for step in range(4):
        torch.manual_seed(10 * step + world.rank)
        x = torch.randn(6, 24)
        stepper.zero_grad()
        stepper.backward_and_step(ours(x).pow(2).sum())
        theirs.zero_grad()
        model(x).pow(2).sum().backward()
        theirs.step()
    for mine, other in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other) or world.world_size > 2
        torch.testing.assert_close(mine, other)
    dist.barrier()


@pytest.mark.parametrize("optimizer", ["SGD", "NodeSharedSGD"])
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("mpi", 2)])
def test_training_is_torchs(ranks, backend, size, optimizer):
    ranks(backend, size)(beside_torch, optimizer)
