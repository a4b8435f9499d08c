"""Once the order is agreed on, autograd calls for the last gradient of each bucket alone."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_from_scratch as ddp
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.reducer import CoreReducer
from tests.support.on_ranks import on

LAYERS, WIDTH = 6, 8


class Layers(nn.Module):
    """A chain of layers, in an order that may differ from pass to pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.order = range(LAYERS)

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


def inputs(step, rank, part=0):
    return torch.randn(
        4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank)
    )


def once(forward, model, step, rank):
    forward(inputs(step, rank)).backward()


def reversed_in_step_3(forward, model, step, rank):
    model.order = range(LAYERS)[:: -1 if step == 3 else 1]
    once(forward, model, step, rank)


def other_on_each_rank_in_step_3(forward, model, step, rank):
    model.order = range(LAYERS)[:: -1 if step == 3 and rank else 1]
    once(forward, model, step, rank)


def accumulated(forward, model, step, rank):
    with forward.no_sync():
        forward(inputs(step, rank, 1)).backward()
    once(forward, model, step, rank)


def partly_accumulated(forward, model, step, rank):
    with forward.no_sync():
        # The last member of no bucket, in most layouts.
        model.layers[2](inputs(step, rank, 1)).sum().backward()
    once(forward, model, step, rank)


def shared(forward, model, step, rank):
    model.order = [0, 1, 2, 1, 3, 4, 5]
    once(forward, model, step, rank)


PROGRAMS = [
    once,
    reversed_in_step_3,
    other_on_each_rank_in_step_3,
    accumulated,
    partly_accumulated,
    shared,
]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@on("gloo-2")
def test_gradients_are_those_of_torchs_ddp(world, program, views):
    options = {"bucket_cap_mb": 600 / 2**20, "gradient_as_bucket_view": views}
    ours, theirs = Layers(), Layers()
    forwards = (
        ddp.DistributedDataParallel(ours, **options),
        DistributedDataParallel(theirs, **options),
    )
    for step in range(6):
        for model, forward in zip((ours, theirs), forwards, strict=True):
            # A `.grad` that stays is no sign that a gradient has arrived.
            model.zero_grad(set_to_none=step != 4)
            program(forward, model, step, world.rank)
        assert forwards[0].reducer.hook_per_bucket
        for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(parameter.grad, reference.grad), step


def in_parts(model, first, step, rank):
    """Two backward passes outside of `no_sync()`: the first leaves most gradients out."""
    model.layers[first](inputs(step, rank)).sum().backward()
    x = inputs(step, rank, 1)
    for index in set(range(LAYERS)) - {first}:
        x = torch.tanh(model.layers[index](x))
    x.sum().backward()


# Of layer 5 Python is told at once, of layer 2 only together with others.
@pytest.mark.parametrize(("first", "stays"), [(2, True), (5, False)])
@on("gloo-2")
def test_a_loss_in_parts_goes_back_to_a_hook_per_gradient(world, first, stays):
    ours = Layers()
    reducer = ddp.Reducer(ours, bucket_cap_mb=600 / 2**20)
    for step in range(5):
        whole = [Layers() for _ in range(2)]
        for rank, model in enumerate(whole):
            in_parts(model, first, step, rank)
        ours.zero_grad()
        if step < 2:
            once(ours, ours, step, world.rank)
            continue
        in_parts(ours, first, step, world.rank)
        # The last pass brought the last gradients.
        assert reducer.iteration == step + 1
        for parameter, *alone in zip(*(m.parameters() for m in (ours, *whole)), strict=True):
            torch.testing.assert_close(parameter.grad, (alone[0].grad + alone[1].grad) / 2)
    assert reducer.hook_per_bucket is stays
    assert ("a hook per bucket" in repr(reducer)) is stays


@on("gloo-2")
def test_an_average_that_gets_more_is_averaged_again(world):
    model = Layers()
    reducer = ddp.Reducer(model, bucket_cap_mb=600 / 2**20)
    for step in range(4):
        model.zero_grad()
        loss = model(inputs(step, world.rank))
        loss.backward(retain_graph=True, create_graph=step == 3)
        once_averaged = [parameter.grad.detach().clone() for parameter in model.parameters()]
        loss.backward()
        assert reducer.iteration == 2 * step + 2
        for parameter, average in zip(model.parameters(), once_averaged, strict=True):
            torch.testing.assert_close(parameter.grad.detach(), 2 * average)


@on("gloo-2")
def test_python_is_called_once_for_each_bucket_and_for_the_first_gradient(world):
    model = Layers()
    reducer = ddp.Reducer(model, bucket_cap_mb=600 / 2**20)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        ready = CoreReducer._ready
        patch.setattr(
            CoreReducer,
            "_count",
            lambda self, i, g, count=CoreReducer._count: (told.append(i), count(self, i, g))[1],
        )
        once(model, model, 0, world.rank)
        assert len(told) == 2 * LAYERS
        told.clear()
        once(model, model, 1, world.rank)
    assert ready is CoreReducer._ready
    assert told == [reducer.names.index(reducer.ready_order[0])]
    assert "a hook per bucket" in repr(reducer)


OTHERWISE = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"fuse_wgrad": True},
]


@pytest.mark.parametrize("options", OTHERWISE, ids=str)
@on("gloo-2")
def test_options_that_ask_for_each_gradient_get_each(world, options):
    model = Layers()
    reducer = ddp.Reducer(model, **options)
    for step in range(3):
        once(model, model, step, world.rank)
    assert not reducer.hook_per_bucket


class Nothing(torch.autograd.Function):
    """A function with no gradient for its second input."""

    @staticmethod
    def forward(context, x, weight):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def without_a_gradient(model, world):
    x = model.layers[0](inputs(3, world.rank))
    for index in range(1, LAYERS):
        x = Nothing.apply(x, model.layers[index].weight) if index == 2 else model.layers[index](x)
    (x + model.layers[2].bias).sum().backward()


def raises(model, world):
    x = inputs(3, world.rank).requires_grad_()
    y = model.layers[0](x)

    def fail(gradient):
        raise ArithmeticError

    y.register_hook(fail)
    for index in range(1, LAYERS):
        y = model.layers[index](y)
    with pytest.raises(ArithmeticError):
        y.sum().backward()


def noted_alone(model, world):
    """A pass of which Python is told nothing."""
    model.layers[2](inputs(3, world.rank)).sum().backward()


ERRORS = {
    noted_alone: r"no gradient in the last backward pass on rank \d for: layers.0.weight, ",
    without_a_gradient: r"no gradient in the last backward pass on rank \d for: layers.2.weight\.",
    raises: r"the last backward pass on rank \d was broken off",
}


@pytest.mark.parametrize("program", ERRORS, ids=lambda program: program.__name__)
@on("gloo-2")
def test_errors_are_those_of_a_hook_per_gradient(world, program):
    model = Layers()
    reducer = ddp.Reducer(model)
    for step in range(2):
        once(model, model, step, world.rank)
        model.zero_grad()
    assert reducer.hook_per_bucket
    program(model, world)
    with pytest.raises(RuntimeError, match=ERRORS[program]):
        model(inputs(4, world.rank))
    # The next step may begin anew.
    reducer.abort_step()
    model.zero_grad()
    once(model, model, 5, world.rank)
    assert reducer.iteration == 3


@on("gloo-2")
def test_a_step_that_is_aborted_forgets_what_is_noted(world):
    model = Layers()
    reducer = ddp.Reducer(model)
    once(model, model, 0, world.rank)
    noted_alone(model, world)
    reducer.abort_step()
    assert sorted(reducer.missing()) == sorted(reducer.names)


@on("gloo-2")
def test_a_sparse_gradient_is_refused_by_name(world):
    model = Layers()
    reducer = ddp.Reducer(model)
    for step in range(2):
        once(model, model, step, world.rank)
        model.zero_grad()
    layer, row = model.layers[2], torch.tensor([1])
    # In its place, so that the gradient arrives where the order expects it.
    layer.forward = lambda x: (
        x + nn.functional.embedding(row, layer.weight, sparse=True) + layer.bias
    )
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight is sparse on rank"):
        once(model, model, 3, world.rank)
    reducer.abort_step()


@on("gloo-2")
def test_a_gradient_with_a_graph_is_refused_in_a_window(world):
    model = Layers()
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    for step in range(2):
        once(model, model, step, world.rank)
        model.zero_grad()
    x = inputs(3, world.rank)
    for layer in model.layers:
        x = layer(x)
    # The gradient that arrives first, that of the last bias, is a constant and has no graph.
    with pytest.raises(RuntimeError, match="cannot keep its graph"):
        x.sum().backward(create_graph=True)
    reducer.abort_step()


@on("gloo-2")
def test_hooks_keep_their_place_among_those_of_the_program(world):
    model, seen = Layers(), []
    reducer = ddp.Reducer(model)
    last = model.layers[0].weight

    def halve(parameter):
        seen.append(reducer.next_bucket)

    once(model, model, 0, world.rank)
    order = reducer.ready_order
    parameters = dict(model.named_parameters())
    last = parameters[order[-1]]
    last.register_post_accumulate_grad_hook(halve)
    reducer.lay_out(order, [1, 2**20])
    once(model, model, 1, world.rank)
    # Registered later, called later: every bucket has been launched.
    assert seen == [len(reducer.all_buckets)]


@on("gloo-2")
def test_only_an_extension_that_asks_for_gradients_changes_hooks(world):
    """`backward_and_step` adds one in every step."""
    model = Layers()
    reducer = ddp.Reducer(model)
    once(model, model, 0, world.rank)
    with patch.object(reducer.hooks, "note", wraps=reducer.hooks.note) as note:
        for kind, calls, per_bucket in ((Extension, 0, True), (Gradients, 1, False)):
            extension = kind()
            reducer.add_extension(extension)
            assert (note.call_count, reducer.hook_per_bucket) == (calls, per_bucket)
            reducer.remove_extension(extension)
            assert reducer.hook_per_bucket


class Gradients(Extension):
    def on_gradient(self, index):
        pass


@on("gloo-2")
def test_parameters_noted_in_a_bucket_do_not_keep_the_model(world):
    model = Layers()
    ddp.Reducer(model)
    once(model, model, 0, world.rank)
    model.layers[2](inputs(1, world.rank)).sum().backward()  # noted, and nothing more
    found = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert [each() for each in found] == [None] * len(found)
    dist.barrier()


def test_what_is_noted_counts_under_no_sync_only_if_it_came_before(tmp_path):
    """In a world of one, without processes: `no_sync()` neither loses nor invents gradients."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Layers()
        reducer = ddp.Reducer(model)
        once(model, model, 0, 0)
        model.zero_grad()
        with reducer.no_sync():
            model.layers[2](inputs(1, 0)).sum().backward()
        assert all(len(bucket.missing) == len(bucket.members) for bucket in reducer.all_buckets)
        assert not any(bucket.noted for bucket in reducer.all_buckets)
        model.layers[2](inputs(1, 0)).sum().backward()
        with reducer.no_sync():
            found = set(reducer.names) - set(reducer.missing())
        assert found == {"layers.2.weight", "layers.2.bias"}
    finally:
        dist.destroy_process_group()
