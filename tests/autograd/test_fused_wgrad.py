"""Weight gradients computed into their buckets: the same bits, and torch's way where it must be."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

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


def test_an_embedding_that_is_the_head_too():
    model = Tied()
    theirs = copy.deepcopy(model)
    reducer = ddp.Reducer(model, fuse_wgrad=True)
    for step in range(3):
        for net in (model, theirs):
            net.zero_grad()
            net((TOKENS["many"] + step) % 11).square().sum().backward()
        assert torch.equal(model.head.weight.grad, theirs.head.weight.grad)
    assert in_bucket(reducer, model.embedding.weight)


def scaled():
    return nn.Embedding(11, 24, scale_grad_by_freq=True)


def shortened():
    return nn.Embedding(11, 24, max_norm=0.5)


def hooked():
    layer = nn.Embedding(11, 24)
    layer.weight.register_hook(lambda gradient: None)
    return layer


def parametrized():
    return parametrizations.weight_norm(nn.Embedding(11, 24))


@pytest.mark.parametrize("make", [scaled, shortened, hooked, parametrized])
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


def test_gradients_of_an_embeddings_gradients():
    model = Tied()
    theirs = copy.deepcopy(model)
    ddp.Reducer(model, fuse_wgrad=True)
    found = []
    for net in (model, theirs):
        loss = net(TOKENS["repeated"]).square().sum()
        (gradient,) = torch.autograd.grad(loss, net.parameters(), create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), net.parameters()))
    torch.testing.assert_close(*found)


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


def test_complex_weights_are_left_to_autograd():
    model = nn.Linear(24, 24, dtype=torch.complex64)
    theirs = copy.deepcopy(model)
    ddp.Reducer(model, fuse_wgrad=True)
    for net in (model, theirs):
        net(X * (1 + 2j)).abs().sum().backward()
    assert torch.equal(model.weight.grad, theirs.weight.grad)


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


class OwnEmbedding(nn.Embedding):
    pass


def test_subclasses_of_embeddings_keep_their_forward():
    model = OwnEmbedding(11, 24)
    ddp.Reducer(model, fuse_wgrad=True)
    assert "forward" not in vars(model)


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


class Words(nn.Module):
    """Two words' embeddings, and a head with the weight of one of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(50, 24), nn.Embedding(60, 24, padding_idx=3)
        self.between = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50)
        self.head.weight = self.first.weight

    def forward(self, x):
        tokens = (100 * x.abs()).long() % 50
        return self.head(torch.tanh(self.between(self.first(tokens) + self.second(tokens // 2))))


def layers():
    return nn.Sequential(nn.Linear(24, 300), nn.ReLU(), nn.Linear(300, 7))


def beside_torch(world, optimizer, make):
    torch.manual_seed(0)
    ours = make()
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


@pytest.mark.parametrize("make", [layers, Words])
@pytest.mark.parametrize("optimizer", ["SGD", "NodeSharedSGD"])
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("mpi", 2)])
def test_training_is_torchs(ranks, backend, size, optimizer, make):
    ranks(backend, size)(beside_torch, optimizer, make)


def bits(world):
    """The gradients of some passes, with the option and without."""
    torch.manual_seed(0)
    plain = Words()
    models = (plain, copy.deepcopy(plain))
    reducers = [
        ddp.Reducer(m, fuse_wgrad=fuse) for m, fuse in zip(models, (True, False), strict=True)
    ]
    for step in range(3):
        for model in models:
            torch.manual_seed(10 * step + world.rank)
            model.zero_grad()
            model(torch.randn(6, 24)).pow(2).sum().backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.grad, other.grad)
    for reducer in reducers:
        reducer.remove()


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("mpi", 2)])
def test_gradients_have_the_bits_of_a_reducer_without_it(ranks, backend, size):
    ranks(backend, size)(bits)
