"""torch.compile of what is synchronised: gradients are those of the same model, not compiled."""

import copy
import shutil
from functools import partial

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.core.observer import Observer
from tests.support.on_ranks import on
from tests.support.tiers import slow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, branch=True):
        h = self.body(x)
        return self.head(h + self.branch(h) if branch else h)


@pytest.mark.slow
@on("gloo-2")
def test_compiled_autograd_is_refused(world):
    model = Net()
    reducer = ddp.Reducer(model, sync_buffers=True)
    x = torch.ones(5, 6) * (world.rank + torch.arange(5.0)[:, None])
    model(x).sum().backward()
    compiler = partial(torch.compile, backend="eager")
    loss = model(x).sum()
    with (
        torch._dynamo.compiled_autograd._enable(compiler),
        pytest.raises(RuntimeError, match=r"^compiled autograd is not supported"),
    ):
        loss.backward()
    reducer.remove()
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("cc") is None, reason="torch.compile wants a C compiler")
@pytest.mark.parametrize(
    ("how", "unused"), [slow("inside", False), slow("wrapper", True), ("bare", True)]
)
@on("gloo-2")
def test_compiled(world, how, unused):
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager")
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    options = {"find_unused_parameters": unused, "gradient_as_bucket_view": unused}
    if how == "inside":
        called = ddp.DistributedDataParallel(compiled(model), **options)
    elif how == "wrapper":
        called = compiled(ddp.DistributedDataParallel(model, **options))
    else:
        ddp.Reducer(model, **options)
        called = compiled(model)
    ddp.Reducer(plain, find_unused_parameters=unused)
    torch.manual_seed(world.rank)
    for step in range(4):
        x = torch.randn(5, 6)
        branch = not unused or (step + world.rank) % 2 == 0
        for each, net in ((called, model), (plain, plain)):
            net.zero_grad()
            each(x, branch).square().mean().backward()
        grads = [[p.grad for p in net.parameters()] for net in (model, plain)]
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p -= 0.1 * p.grad
    ddp.check_sync(model)


class Ready(Observer):
    """Notes whose gradients are ready, and what the test adds."""

    def __init__(self):
        self.seen = []

    def on_gradient(self, index):
        self.seen.append(index)


class Two(nn.Sequential):
    def forward(self, x):  # torch 2.11 compiles no forward of torch.nn in place
        return self[1](self[0](x))


@pytest.mark.skipif(shutil.which("cc") is None, reason="torch.compile wants a C compiler")
@on("gloo-2")
def test_gradients_of_what_is_compiled_together_arrive_together(world):
    torch._dynamo.reset()
    models = [Two(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    whole, in_place, by_block = models
    for part in (in_place, *by_block):
        part.compile(backend="aot_eager")
    whole = torch.compile(whole, backend="aot_eager")
    x, told = torch.ones(2, 4), ", compiled as a whole: gradients arrive at the end of backward"
    for model in (whole, in_place):
        reducer = ddp.Reducer(model)
        assert str(reducer.stats()).endswith(told)
        # One node of the graph returns the gradients of all parameters.
        output = model(x)  # torch 2.11 frees the graph with it
        nodes = [node for node, _ in output.grad_fn.next_functions]
        found = {id(getattr(node, "variable", None)) for node in nodes}
        assert found >= {id(parameter) for parameter in model.parameters()}
        reducer.remove()
    ready = Ready()
    reducer = ddp.Reducer(by_block, observers=[ready])
    assert "compiled" not in str(reducer)
    between = by_block[0](x)
    between.register_hook(lambda gradient: ready.seen.append("between"))
    by_block[1](between).sum().backward()
    assert [*map(set, (ready.seen[:2], ready.seen[3:]))] == [{2, 3}, {0, 1}]
    assert ready.seen[2] == "between"
