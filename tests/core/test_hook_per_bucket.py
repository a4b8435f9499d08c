"""Once the order is agreed on, autograd calls for the last gradient of each bucket alone."""

import gc
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.core.reducer import CoreReducer
from tests.support.on_ranks import on

LAYERS, WIDTH = 6, 8
SEVERAL = {"bucket_cap_mb": 600 / 2**20}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def inputs(step, rank, part=0):
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(4, WIDTH, generator=generator)


def once(model, step, rank):
    model(inputs(step, rank)).backward()


def learnt(world, **options):
    model = Layers()
    reducer = ddp.Reducer(model, **options)
    for step in range(2):
        once(model, step, world.rank)
        model.zero_grad()
    return model, reducer


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
    reducer = ddp.Reducer(ours, **SEVERAL)
    for step in range(5):
        whole = [Layers() for _ in range(2)]
        for rank, model in enumerate(whole):
            in_parts(model, first, step, rank)
        ours.zero_grad()
        if step < 2:
            once(ours, step, world.rank)
            continue
        in_parts(ours, first, step, world.rank)
        # The last pass brought the last gradients.
        assert reducer.iteration == step + 1
        for parameter, *alone in zip(*(m.parameters() for m in (ours, *whole)), strict=True):
            torch.testing.assert_close(parameter.grad, (alone[0].grad + alone[1].grad) / 2)
    assert reducer.stats().hook_per_bucket is stays
    assert ("a hook per bucket" in repr(reducer)) is stays


@on("gloo-2")
def test_python_is_called_once_for_each_bucket_and_for_the_first_gradient(world):
    model = Layers()
    reducer = ddp.Reducer(model, **SEVERAL)
    original = CoreReducer._count
    with patch.object(CoreReducer, "_count", autospec=True, side_effect=original) as count:
        once(model, 0, world.rank)
        assert count.call_count == 2 * LAYERS
        count.reset_mock()
        once(model, 1, world.rank)
    first = reducer.core.names.index(reducer.ready_order[0])
    assert [call.args[1] for call in count.mock_calls] == [first]
    assert "a hook per bucket" in repr(reducer)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "fuse_wgrad"])
@on("gloo-2")
def test_options_that_ask_for_each_gradient_get_each(world, option):
    _, reducer = learnt(world, **{option: True})
    assert not reducer.stats().hook_per_bucket


def raises(model, world):
    handle = model.layers[0].bias.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        once(model, 3, world.rank)
    handle.remove()


def noted_alone(model, world):
    """A pass in which autograd calls no Python."""
    model.layers[2](inputs(3, world.rank)).sum().backward()


def sparse(model, world):
    layer, row = model.layers[2], torch.tensor([1])
    # In its place, so that the gradient arrives where the order expects it.
    looked_up = partial(nn.functional.embedding, row, sparse=True)
    layer.forward = lambda x: x + looked_up(layer.weight) + layer.bias
    once(model, 3, world.rank)


def with_a_graph(model, world):
    x = inputs(3, world.rank)
    for layer in model.layers:
        x = layer(x)
    # The gradient that arrives first, that of the last bias, is a constant and has no graph.
    x.sum().backward(create_graph=True)


MISSING = r"no gradient in the last backward pass on rank \d for: "
ERRORS = {
    noted_alone: f"{MISSING}layers.0.weight, ",
    raises: r"the last backward pass on rank \d was interrupted",
    sparse: r"layers\.2\.weight is sparse on rank",
    with_a_graph: "cannot keep its graph",
}


@pytest.mark.parametrize("program", ERRORS, ids=lambda program: program.__name__)
@on("gloo-2")
def test_errors_are_those_of_a_hook_per_gradient(world, program):
    model, reducer = learnt(world, gradient_as_bucket_view=program is with_a_graph)
    assert reducer.stats().hook_per_bucket

    def run():
        program(model, world)
        model(inputs(4, world.rank))

    with pytest.raises(RuntimeError, match=ERRORS[program]):
        run()
    # The next step may begin.
    reducer.abort_step()
    vars(model.layers[2]).pop("forward", None)
    model.zero_grad()
    once(model, 5, world.rank)
    assert reducer.iteration == 3


@on("gloo-2")
def test_what_is_noted_is_forgotten_by_an_abort_and_counts_before_no_sync(world):
    model, reducer = learnt(world)
    noted_alone(model, world)
    reducer.abort_step()
    assert sorted(reducer.core.missing()) == sorted(reducer.core.names)
    noted_alone(model, world)
    with reducer.no_sync():
        found = set(reducer.core.names) - set(reducer.core.missing())
    assert found == {"layers.2.weight", "layers.2.bias"}


@on("gloo-2")
def test_hooks_of_the_program_come_first_after_a_change_of_layout(world):
    model, seen = Layers(), []
    reducer = ddp.Reducer(model)
    once(model, 0, world.rank)
    last = model.get_parameter(reducer.ready_order[-1])
    last.register_post_accumulate_grad_hook(lambda _: seen.append(reducer.core.average.next_bucket))
    reducer.core.caps = [1, 2**20]
    reducer.core.lay_out()
    once(model, 1, world.rank)
    assert seen == [len(reducer.core.all_buckets) - 1]  # its own is not launched yet


def scale(parameter, factor):
    parameter.grad.mul_(factor)


def replace(parameter, factor):
    parameter.grad = parameter.grad * factor


@pytest.mark.parametrize("change", [scale, replace])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("which", ["all", "the first", "the last"])
@pytest.mark.parametrize(
    "options",
    [{}, SEVERAL, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}, {"overlap": False}],
    ids=str,
)
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@on("gloo-2")
def test_hooks_registered_later_change_what_is_averaged(world, change, steps, which, options, view):
    """As in torch's DDP; in the very pass after their registration, and in every later one."""
    model, alone = Layers(), Layers()
    reducer = ddp.Reducer(model, gradient_as_bucket_view=view, **options)
    for step in range(steps):
        once(model, step, world.rank)
        model.zero_grad()
    names = reducer.ready_order or [*reversed(reducer.core.names)]
    names = {"all": names, "the first": names[:1], "the last": names[-1:]}[which]
    for name in names:
        model.get_parameter(name).register_post_accumulate_grad_hook(
            partial(change, factor=world.rank + 2.0)
        )
    for step in range(steps, steps + 2):
        expected = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
        for rank in range(2):
            alone.zero_grad()
            once(alone, step, rank)
            for name, parameter in alone.named_parameters():
                expected[name] += parameter.grad * ((rank + 2) / 2 if name in names else 0.5)
        once(model, step, world.rank)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=f"{step} {name}")
        model.zero_grad()


@on("gloo-2")
def test_a_hook_registered_later_sees_a_large_gradient(world):
    model, seen = nn.Linear(300, 300), []
    reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for _ in range(3):
        model(torch.ones(1, 300)).sum().backward()
    assert seen == [True] * 3
    reducer.remove()


@on("gloo-2")
def test_a_forgotten_module_is_freed(world):
    model, reducer = learnt(world)
    noted_alone(model, world)
    found = [weakref.ref(each) for each in (model, reducer, *model.parameters())]
    del model, reducer
    gc.collect()
    assert [each() for each in found] == [None] * len(found)
    dist.barrier()
