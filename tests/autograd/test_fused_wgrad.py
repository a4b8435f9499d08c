"""Weight gradients computed into their buckets: the same bits, and torch's way where it must be."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ddp_from_scratch as ddp
from ddp_from_scratch.autograd import fused_wgrad
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


TOKENS = {
    "one": torch.tensor([3]),
    "repeated": torch.tensor([[5, 0, 5, 5], [10, 5, 0, 0]]),
    "short integers": torch.tensor([1, 1, 2], dtype=torch.int32),
    "none": torch.empty(0, dtype=torch.int64),
    "many": torch.randint(11, (40, 50), generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [None, 0, 5, -1])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_embeddings_have_torchs_bits_and_arrive_in_their_windows(tokens, padding, dtype):
    model = nn.Embedding(11, 24, padding, dtype=dtype)
    theirs = copy.deepcopy(model)
    _, arrived = watched(model)
    for step in range(3):  # the window holds the gradient of the step before
        torch.manual_seed(step)
        factor = torch.randn(24, dtype=dtype)
        for net in (model, theirs):
            net.zero_grad()
            (net(tokens).tanh() * factor).sum().backward()
        assert torch.equal(model.weight.grad, theirs.weight.grad)
    assert arrived == {"weight": dtype != torch.bfloat16}


@pytest.mark.parametrize("rows", [1, 1000, 30000])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_large_embeddings_have_torchs_bits(rows, width):
    model = nn.Embedding(rows, width)
    theirs = copy.deepcopy(model)
    ddp.Reducer(model, fuse_wgrad=True)
    torch.manual_seed(2)
    tokens, factor = torch.randint(rows, (700,)), torch.randn(700, width)
    for net in (model, theirs):
        (net(tokens) * factor).sum().backward()
    assert torch.equal(model.weight.grad, theirs.weight.grad)


class Tied(nn.Module):
    """As GPT-2: its head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


def hooked():
    layer = nn.Embedding(11, 24)
    layer.weight.register_hook(lambda gradient: None)
    return layer


OTHERS = {
    "scaled": partial(nn.Embedding, 11, 24, scale_grad_by_freq=True),
    "shortened": partial(nn.Embedding, 11, 24, max_norm=0.5),
    "hooked": hooked,
    "parametrized": lambda: parametrizations.weight_norm(nn.Embedding(11, 24)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_embeddings_take_memory_of_their_own(make):
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    theirs = make()
    _, arrived = watched(model)
    for net in (model, theirs):
        net(TOKENS["repeated"]).square().sum().backward()
    assert not any(arrived.values())
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)


def test_sparse_gradients_stay_sparse():
    model = nn.Embedding(11, 24, sparse=True)
    ddp.Reducer(model, fuse_wgrad=True)
    model(TOKENS["repeated"]).sum().backward()
    assert model.weight.grad.is_sparse


@pytest.mark.parametrize("make", [partial(nn.Linear, bias=False), nn.Embedding])
def test_other_tensors_in_a_weights_place_get_gradients_of_their_own(make):
    model = make(24, 24)
    ddp.Reducer(model, fuse_wgrad=True)
    inputs = TOKENS["repeated"] if make is nn.Embedding else X
    model(inputs).sum().backward()
    model.zero_grad()
    other = torch.ones(24, 24, requires_grad=True)
    torch.func.functional_call(model, {"weight": other}, (inputs,)).square().sum().backward()
    kept = other.grad.clone()
    model(inputs).sum().backward()
    assert torch.equal(other.grad, kept)


@pytest.mark.parametrize("make", [nn.Linear, nn.Embedding])
def test_a_weight_may_change_before_a_backward_pass_that_does_not_read_it(make):
    model = make(24, 24)
    ddp.Reducer(model, fuse_wgrad=True)
    loss = model(X if make is nn.Linear else TOKENS["repeated"]).sum()
    with torch.no_grad():
        model.weight.zero_()
    loss.backward()
    assert model.weight.grad.any()


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


@pytest.mark.parametrize("make", [Net, Tied, partial(nn.Linear, 24, 24, dtype=torch.complex64)])
def test_gradients_of_gradients_and_complex_ones(make):
    model = make()
    theirs = copy.deepcopy(model)
    ddp.Reducer(model, fuse_wgrad=True)
    found = []
    for net in (model, theirs):
        out = net(TOKENS["repeated"]) if make is Tied else net(X if make is Net else X * (1 + 2j))
        loss = out.abs().pow(2).sum()
        gradients = torch.autograd.grad(loss, net.parameters(), create_graph=True)
        weight = next(iter(net.parameters()))
        found.append(torch.autograd.grad(sum(g.abs().pow(2).sum() for g in gradients), weight))
    torch.testing.assert_close(*found)


def test_a_gradient_that_is_ready_or_under_way_is_not_overwritten():
    model = Net()
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    ((second, *_),) = (bucket.layout.members for bucket in reducer.flat_buckets)
    windows = []
    model.first.weight.register_hook(lambda _: windows.append(reducer._claim(second)))
    assert reducer._claim(second) is not None
    model(X).sum().backward()
    assert windows == [None]


def test_other_layers_keep_their_forward():
    class OwnLinear(nn.Linear):
        pass

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
    model.append(nn.Embedding(255, 1024)).append(nn.Embedding(256, 1024))
    ddp.Reducer(model, fuse_wgrad=True)
    assert ["forward" in vars(layer) for layer in model] == [False, True, False, True]


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
