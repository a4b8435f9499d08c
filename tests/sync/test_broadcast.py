"""One model on all ranks: the tree, what is sent along it, and what is refused before."""

import math
import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import (
    DistributedDataParallel,
    Reducer,
    broadcast_buffers,
    broadcast_parameters,
    comm_hooks,
    power_sgd,
)
from ddp_from_scratch.sync.broadcast import tree_neighbours
from tests.support.on_ranks import on
from tests.support.tiers import slow


def test_the_tree_reaches_every_rank_once_and_in_few_hops():
    children = [tree_neighbours(rank, 8)[1] for rank in range(8)]
    assert children == [[4, 2, 1], [], [3], [], [6, 5], [], [7], []]  # as drawn
    for size, root in [(ranks, root) for ranks in range(1, 18) for root in range(ranks)]:
        neighbours = [tree_neighbours(rank, size, root) for rank in range(size)]
        parents = {child: rank for rank, (_, below) in enumerate(neighbours) for child in below}
        assert sum(len(below) for _, below in neighbours) == len(parents) == size - 1
        above = {rank: parent for rank, (parent, _) in enumerate(neighbours) if parent}
        assert above == {child: [parent] for child, parent in parents.items()}
        for rank in range(size):
            hops = 0
            while rank != root:
                rank, hops = parents[rank], hops + 1
                assert hops <= math.ceil(math.log2(size))


DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.bool, torch.complex64),
)


class Zoo(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def values(shape, dtype=torch.float32):
            return torch.randint(-9, 10, shape, generator=draw).to(dtype)

        for dtype in DTYPES:
            for number, shape in enumerate([(), (2, 3), (0, 4)]):
                name = f"{str(dtype).removeprefix('torch.')}_{number}"
                self.register_buffer(f"buffer_{name}", values(shape, dtype))
                if dtype.is_floating_point or dtype.is_complex:
                    self.register_parameter(name, nn.Parameter(values(shape, dtype)))
        self.frozen = nn.Parameter(values((4,)), requires_grad=False)
        self.tied = self.transposed = nn.Parameter(values((3, 2)).t())
        last = values((2, 3, 2, 2)).to(memory_format=torch.channels_last)
        self.channels_last = nn.Parameter(last)
        self.with_holes = nn.Parameter(values((40,)).as_strided((2, 3), (20, 2)))
        self.buffer_unsaved = nn.Buffer(values((2,)), persistent=False)

    def tensors(self):
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers()]
        return dict(named)


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@patch("ddp_from_scratch.sync.broadcast.MESSAGE_BYTES", 32)
def parameters_and_buffers_in_place(world):
    for src in range(world.world_size):
        model = Zoo(100 + world.rank)
        before = [(t.data_ptr(), t.stride()) for t in model.tensors().values()]
        broadcast_parameters(model, src=src)
        assert same(model.tensors(), Zoo(100 + src).tensors()), f"from rank {src}"
        assert before == [(t.data_ptr(), t.stride()) for t in model.tensors().values()]
        assert model.tied is model.transposed
        assert all(p.grad is None and p.is_leaf for p in model.parameters())
    model = Zoo(100 + world.rank)
    broadcast_buffers(model, src=src, ignore=["buffer_int64_1"])
    mine, source = Zoo(100 + world.rank).tensors(), Zoo(100 + src).tensors()
    for name, values in model.tensors().items():
        sent = name.startswith("buffer") and name != "buffer_int64_1"
        assert torch.equal(values, (source if sent else mine)[name]), name


def within_a_group_and_without_what_is_ignored(world):
    """Ranks 0 and 2 are 0 and 1 of their group."""
    broadcast_parameters(nn.ReLU())
    broadcast_buffers(nn.Linear(2, 2))  # has none
    group = dist.new_group([0, 2])
    model = Zoo(100 + world.rank)
    if world.rank in (0, 2):
        broadcast_parameters(model, 1, group, ignore=["float32_1", "buffer_bool_1"])
    mine, expected = (Zoo(100 + r).tensors() for r in (world.rank, world.rank or 2))
    for name in ("float32_1", "buffer_bool_1"):
        expected[name] = mine[name]
    assert same(model.tensors(), expected)


# From four ranks on, one that receives passes on.
@pytest.mark.parametrize("crew", ["gloo-4", slow("mpi-3")], indirect=True)
@pytest.mark.parametrize(
    "what", [parameters_and_buffers_in_place, within_a_group_and_without_what_is_ignored]
)
def test_ranks_get_the_sources(crew, what):
    crew(what)


def mlp(layer=None, name="", value=None, **others):
    layers = {"one": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "two": nn.Linear(3, 4)}
    model = nn.ModuleDict(layers | others)
    if layer:
        setattr(model[layer], name, value)
    return model


MEAN = "buffer norm.running_mean: shape (3,)"
# What one rank has instead of `mlp()`; and what the error says that the others have, and it has.
DIFFERENT = [
    (lambda: nn.ModuleDict({"one_": mlp().one}), "parameter one.weight", "parameter one_.weight"),
    (lambda: mlp(two=nn.Linear(3, 4, bias=False)), "parameter two.bias: shape (4,)", MEAN),
    (lambda: mlp(two=nn.Linear(3, 5)), "two.weight: shape (4, 3)", "two.weight: shape (5, 3)"),
    (lambda: mlp("one", "weight", ACROSS), "strides (2, 1)", "strides (1, 3)"),
    (lambda: mlp(one=nn.Linear(2, 3).half()), "torch.float32", "torch.float16"),
    (lambda: mlp(two=nn.Linear(3, 4).requires_grad_(False)), "grad=True", "grad=False"),
    (lambda: mlp("norm", "running_mean", torch.zeros(3, 1)), MEAN, "mean: shape (3, 1)"),
    (lambda: mlp("norm", "running_mean", torch.zeros(3).double()), f"{MEAN}, torch.float32", "64"),
    (lambda: mlp("norm", "num_batches_tracked", None), "tracked: shape", "only 8 p"),
]
ACROSS = nn.Parameter(torch.zeros(2, 3).t())


def refused(world):
    """One model is another one, on rank 2 and then on rank 0; the errors' texts."""
    texts = []
    for make, usual, unusual in DIFFERENT:
        for odd, zero, rank, other in ((2, usual, 2, unusual), (0, unusual, 1, usual)):
            model = make() if world.rank == odd else mlp()
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            has = rf"rank 0 has .*{re.escape(zero)}.*[;,] rank {rank} has .*{re.escape(other)}"
            with pytest.raises(RuntimeError, match=f"^the models differ: {has}") as caught:
                broadcast_parameters(model)
            assert same(before, model.state_dict()), "values were sent"
            texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_different_models_are_refused_with_one_text_on_every_rank(ranks, backend):
    found = ranks(backend, 3)(refused)
    assert found == [found[0]] * 3


def expanded(kind):
    module, tensor = nn.Linear(2, 2), torch.zeros(1).expand(5)
    module.wide = nn.Parameter(tensor) if kind == "parameter" else nn.Buffer(tensor)
    return module


def lazy():
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


RANK = "rank of the group, 0 to 2, got "
WIDE = "wide is expanded: .*: clone"
# On all ranks: the text, and what raises it.
EVERYWHERE = [
    (f"{RANK}-1", lambda: broadcast_parameters(nn.Linear(2, 2), -1)),
    (f"{RANK}3", lambda: broadcast_buffers(nn.Linear(2, 2), 3)),
    ("parameter 1.weight.* lazy", lambda: broadcast_parameters(lazy())),
    ("buffer running_mean.* lazy", lambda: broadcast_parameters(nn.LazyBatchNorm1d(affine=False))),
    (f"parameter {WIDE}", lambda: broadcast_parameters(expanded("parameter"))),
    (f"parameter {WIDE}", lambda: DistributedDataParallel(expanded("parameter"))),
    (f"buffer {WIDE}", lambda: broadcast_parameters(expanded("buffer"))),
    (f"buffer {WIDE}", lambda: broadcast_buffers(expanded("buffer"))),
    (f"buffer {WIDE}", lambda: Reducer(expanded("buffer"), sync_buffers=True)),
]


@on("gloo-3")
def test_what_cannot_be_sent_is_refused_on_all_ranks(world):
    for text, call in EVERYWHERE:
        with pytest.raises(ValueError, match=text):
            call()
    # On one rank alone, the others would wait for it.
    model = lazy()
    if world.rank != 1:
        model(torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match=r"parameter 1.weight.* lazy"):
        broadcast_parameters(model)
    with pytest.raises(RuntimeError, match="the models differ: rank 0 has "):
        broadcast_parameters(expanded("buffer" if world.rank else "parameter"))
    # What is not sent may be expanded.
    Reducer(expanded("buffer")).remove()
    broadcast_parameters(expanded("buffer"), ignore=["wide"])


@on("pair")
def test_a_reducer_names_the_difference_where_the_broadcast_was_left_out(world):
    has = [rf"rank {rank} has parameter weight: shape \({rank + 2}, 10\)" for rank in range(2)]
    for options in ({}, {"shared_memory": False}):
        with pytest.raises(RuntimeError, match=f"^the models differ: {has[0]}.*; {has[1]}"):
            Reducer(nn.Linear(10, 2 + world.rank), **options)
    more = nn.ModuleList(nn.Linear(1, 1) for _ in range(1 + world.rank))
    with pytest.raises(RuntimeError, match=r"^the models differ: rank 0 has only 2 parameters; "):
        Reducer(more)
    model = nn.Linear(1, 1)
    reducer = Reducer(model)  # the group is still of use
    with pytest.raises(TypeError, match=r"call the module itself, model\(x\)"):
        reducer(torch.ones(1, 1))


# What decides what a Reducer sends or computes, and a value that is not the default.
COMPARED = {
    "bucket_cap_mb": [0, 2],
    "find_unused_parameters": True,
    "static_graph": True,
    "sync_buffers": True,
    "check_every": 5,
    "straggler_every": 5,
    "shared_memory": False,
    "ready_order": ["bias", "weight"],
    "reduce": "sum",
    "check_finite": True,
}


@pytest.mark.parametrize("name", COMPARED)
@on("pair")
def test_a_reducer_names_the_option_that_ranks_do_not_have_in_common(world, name):
    with pytest.raises(RuntimeError) as caught:
        Reducer(nn.Linear(2, 2), **({name: COMPARED[name]} if world.rank else {}))
    assert re.match(
        rf"the Reducers' options differ: rank 0 has {name}=.*; rank 1 has {name}=",
        str(caught.value),
    )
    Reducer(nn.Linear(2, 2), **{name: COMPARED[name]}).remove()  # the group is still of use


@on("gloo-2")
def test_the_first_average_names_the_comm_hook_that_ranks_do_not_have_in_common(world):
    """PowerSGD sends at first what no comm hook sends, too."""
    model = nn.Linear(2, 2)
    reducer = Reducer(model, shared_memory=False)
    if world.rank == 1:
        reducer.register_comm_hook(power_sgd.PowerSGDState(), power_sgd.power_sgd_hook)
    text = (
        "options differ: rank 0 has no comm hook of this package; "
        "rank 1 has the comm hook power_sgd_hook; or, if "
    )
    with pytest.raises(RuntimeError, match=text):
        model(torch.ones(1, 2)).sum().backward()


@on("gloo-2")
def test_a_program_may_have_a_hook_of_its_own_on_one_rank(world):
    model, seen = nn.Linear(2, 2), []

    def noted(state, bucket):
        seen.append(bucket.index())
        return comm_hooks.allreduce_hook(state, bucket)

    reducer = Reducer(model, shared_memory=False)
    if world.rank == 1:
        reducer.register_comm_hook(None, noted)
    model(torch.full((1, 2), world.rank + 1.0)).sum().backward()
    assert model.weight.grad.eq(1.5).all()
    assert seen == [0] * world.rank


@on("pair")
def test_the_first_average_names_a_static_graph_that_one_rank_has_set(world):
    model = nn.Linear(2, 2)
    reducer = Reducer(model)
    if world.rank == 1:
        reducer.set_static_graph()
    text = "rank 0 has static_graph=False; rank 1 has static_graph=True; or, if "
    with pytest.raises(RuntimeError, match=text):
        model(torch.ones(1, 2)).sum().backward()


@on("gloo-2")
def test_the_first_average_names_another_number_of_virtual_ranks(world):
    model = nn.Linear(2, 2)
    reducer = Reducer(model, virtual_ranks=2 + 2 * world.rank, shared_memory=False)
    text = "options differ: rank 0 has virtual_ranks=2; rank 1 has virtual_ranks=4; or, if "
    with pytest.raises(RuntimeError, match=text):
        reducer.run_virtual_ranks(lambda _: model(torch.ones(1, 2)).sum().backward())


@on("pair")
def test_a_reducer_names_a_gradient_dtype_that_ranks_do_not_have_in_common(world):
    model = nn.Linear(2, 2)
    if world.rank == 1:
        model.weight.grad_dtype = torch.float64
    text = r"rank 0 has grad_dtype={}; rank 1 has grad_dtype={'weight': torch\.float64}"
    with pytest.raises(RuntimeError, match=text):
        Reducer(model)


@on("pair")
def test_a_wrapper_names_the_option_that_ranks_do_not_have_in_common(world):
    text = "the Reducers' options differ: rank 0 has reduce='mean'; rank 1 has reduce='sum'"
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        DistributedDataParallel(nn.Linear(2, 2), reduce="sum" if world.rank else "mean")
    with pytest.raises(RuntimeError, match=r"rank 0 has skip_unused=False; rank 1 has"):
        DistributedDataParallel(nn.Linear(2, 2), skip_all_reduce_unused_params=world.rank == 1)
    # Equal caps may be written differently, and this one is a rank's own.
    Reducer(nn.Linear(2, 2), bucket_cap_mb=[1, 25] if world.rank else None).remove()
    Reducer(
        nn.Linear(2, 2), stall_after=5 if world.rank else None, overlap=world.rank == 0
    ).remove()
