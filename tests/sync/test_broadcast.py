"""One model on all ranks: the tree, what travels along it, and what is refused before."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import broadcast_buffers, broadcast_parameters
from ddp_from_scratch.group import on_gpu_of
from ddp_from_scratch.sync.broadcast import check_same_model, tree_neighbours
from tests.support.tiers import slow


# From four ranks on, one that receives passes on.
@pytest.fixture(
    params=["gloo-4", "mpi-3", *map(slow, ("gloo-2", "gloo-3", "mpi-2", "mpi-4"))],
)
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


# The tree ---------------------------------------------------------------------------------------

WORLD_SIZES = range(1, 18)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tree_reaches_every_rank_once_and_in_few_hops(world_size):
    for root in range(world_size):
        depth = {root: 0}
        waiting = [root]
        while waiting:
            rank = waiting.pop()
            for child in tree_neighbours(rank, world_size, root)[1]:
                assert child not in depth, f"{child} is reached twice from root {root}"
                depth[child] = depth[rank] + 1
                waiting.append(child)
        assert sorted(depth) == list(range(world_size))
        assert max(depth.values()) <= math.ceil(math.log2(world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tree_parents_and_children_agree(world_size):
    for root in range(world_size):
        neighbours = [tree_neighbours(rank, world_size, root) for rank in range(world_size)]
        assert neighbours[root][0] is None
        for rank, (parent, _) in enumerate(neighbours):
            if rank != root:
                assert rank in neighbours[parent][1]
        assert sum(len(children) for _, children in neighbours) == world_size - 1


def test_tree_of_eight_is_the_one_drawn():
    children = [tree_neighbours(rank, 8)[1] for rank in range(8)]
    assert children == [[4, 2, 1], [], [3], [], [6, 5], [], [7], []]


# What travels -----------------------------------------------------------------------------------

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.bool, torch.complex64),
)
SHAPES = ((), (3,), (2, 3), (0, 4))


class Zoo(nn.Module):
    """Every dtype in every shape, as parameters where there can be one and as buffers."""

    def __init__(self, seed: int):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def values(shape, dtype=torch.float32):
            return torch.randint(-9, 10, shape, generator=draw).to(dtype)

        for dtype in DTYPES:
            for number, shape in enumerate(SHAPES):
                name = f"{str(dtype).removeprefix('torch.')}_{number}"
                self.register_buffer(f"buffer_{name}", values(shape, dtype))
                if dtype.is_floating_point or dtype.is_complex:
                    self.register_parameter(name, nn.Parameter(values(shape, dtype)))
        self.frozen = nn.Parameter(values((4,)), requires_grad=False)
        self.transposed = nn.Parameter(values((3, 2)).t())
        self.channels_last = nn.Parameter(
            values((2, 3, 2, 2)).to(memory_format=torch.channels_last)
        )
        self.with_holes = nn.Parameter(values((40,)).as_strided((2, 3), (20, 2)))
        self.tied = self.transposed
        self.unsaved = nn.Buffer(values((2,)), persistent=False)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of all names, copied."""
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor.detach().clone() for name, tensor in every}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def broadcast_zoo(world):
    for src in range(world.world_size):
        model, source = Zoo(100 + world.rank), Zoo(100 + src)
        before = [(t.data_ptr(), t.stride()) for t in (*model.parameters(), *model.buffers())]
        broadcast_parameters(model, src=src)
        after = [(t.data_ptr(), t.stride()) for t in (*model.parameters(), *model.buffers())]
        assert same(state(model), state(source)), f"from rank {src}"
        assert before == after
        assert model.tied is model.transposed
        assert all(p.grad is None and p.is_leaf for p in model.parameters())


def test_every_rank_gets_every_tensor_of_the_source_in_place(crew):
    crew(broadcast_zoo)


def broadcast_buffers_only(world):
    last = world.world_size - 1
    model = Zoo(100 + world.rank)
    broadcast_buffers(model, src=last)
    mine, source = state(Zoo(100 + world.rank)), state(Zoo(100 + last))
    for name, values in state(model).items():
        is_buffer = "buffer" in name or name == "unsaved"
        assert torch.equal(values, (source if is_buffer else mine)[name]), name


def test_broadcast_buffers_leaves_parameters_alone(crew):
    crew(broadcast_buffers_only)


def broadcast_large(world):
    """40 MiB in tensors that do not end where messages do: three messages."""
    model = nn.ParameterList(torch.full((3 * 2**18,), 10.0 * world.rank + i) for i in range(14))
    sizes = []
    batch = dist.batch_isend_irecv

    def record(operations):
        sizes.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return batch(operations)

    with patch.object(dist, "batch_isend_irecv", record):
        broadcast_parameters(model)
    assert [p.unique().tolist() for p in model] == [[i] for i in range(14)]
    _, children = tree_neighbours(world.rank, world.world_size)
    assert len(sizes) == 3 * len(children)
    assert sum(sizes) == 42 * 2**20 * len(children)


def test_a_large_model_travels_in_several_messages(crew):
    crew(broadcast_large)


def broadcast_nothing(world):
    broadcast_parameters(nn.ReLU())
    broadcast_buffers(nn.Linear(2, 2))


def test_nothing_to_send(trio):
    trio(broadcast_nothing)


def broadcast_in_subgroup(world):
    """Ranks 0 and 2, which are 0 and 1 of their group."""
    group = dist.new_group([0, 2])
    model = Zoo(100 + world.rank)
    if world.rank != 1:
        broadcast_parameters(model, src=1, process_group=group)
    dist.destroy_process_group(group)
    assert same(state(model), state(Zoo(101 if world.rank == 1 else 102)))


def test_src_is_a_rank_of_the_group(trio):
    trio(broadcast_in_subgroup)


def broadcast_from(world, src):
    for broadcast in (broadcast_parameters, broadcast_buffers):
        with pytest.raises(ValueError, match=f"src must be a rank of the group, 0 to 2, got {src}"):
            broadcast(nn.Linear(2, 2), src=src)


@pytest.mark.parametrize("src", [-1, 3])
def test_src_that_is_no_rank(trio, src):
    trio(broadcast_from, src)


# What is refused --------------------------------------------------------------------------------


def mlp(**changed: nn.Module) -> nn.ModuleDict:
    layers = {"one": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "two": nn.Linear(3, 4)}
    return nn.ModuleDict(layers | changed)


def renamed() -> nn.Module:
    return nn.ModuleDict({f"{name}_": layer for name, layer in mlp().items()})


def reordered() -> nn.Module:
    """Two parameters of one shape, the other way round."""
    model = mlp()
    weight = model.norm.weight
    del model.norm.weight
    model.norm.weight = weight
    return model


def other_strides() -> nn.Module:
    model = mlp()
    model.one.weight = nn.Parameter(torch.zeros(2, 3).t())
    return model


def frozen() -> nn.Module:
    model = mlp()
    model.two.weight.requires_grad = False
    return model


def other_buffer(buffer: torch.Tensor) -> nn.Module:
    model = mlp()
    model.norm.running_mean = buffer
    return model


# What one rank builds instead of `mlp()`, and how the texts about the others and about it begin.
DIFFERENT = {
    "parameter missing": (
        lambda: mlp(two=nn.Linear(3, 4, bias=False)),
        "parameter two.bias",
        "buffer norm.running_mean",
    ),
    "name": (renamed, "parameter one.weight", "parameter one_.weight"),
    "order": (reordered, "parameter norm.weight", "parameter norm.bias"),
    "shape": (
        lambda: mlp(two=nn.Linear(3, 5)),
        "parameter two.weight: shape (4, 3)",
        "parameter two.weight: shape (5, 3)",
    ),
    "strides": (
        other_strides,
        "parameter one.weight: shape (3, 2), strides (2, 1)",
        "parameter one.weight: shape (3, 2), strides (1, 3)",
    ),
    "dtype": (
        lambda: mlp(one=nn.Linear(2, 3).half()),
        "parameter one.weight: shape (3, 2), strides (2, 1), torch.float32",
        "parameter one.weight: shape (3, 2), strides (2, 1), torch.float16",
    ),
    "requires_grad": (
        frozen,
        "parameter two.weight: shape (4, 3), strides (3, 1), torch.float32, requires_grad=True",
        "parameter two.weight: shape (4, 3), strides (3, 1), torch.float32, requires_grad=False",
    ),
    "buffer shape": (
        lambda: other_buffer(torch.zeros(3, 1)),
        "buffer norm.running_mean: shape (3,)",
        "buffer norm.running_mean: shape (3, 1)",
    ),
    "buffer dtype": (
        lambda: other_buffer(torch.zeros(3).double()),
        "buffer norm.running_mean: shape (3,), torch.float32",
        "buffer norm.running_mean: shape (3,), torch.float64",
    ),
}


def refused(world, kind, odd):
    model = DIFFERENT[kind][0]() if world.rank == odd else mlp()
    before = state(model)
    with pytest.raises(RuntimeError) as caught:
        broadcast_parameters(model)
    assert same(before, state(model)), "values were sent"
    return str(caught.value)


@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 2])
def test_different_models_are_refused_with_one_text_on_every_rank(trio, kind, odd):
    _, usual, unusual = DIFFERENT[kind]
    zero, other, rank = (unusual, usual, 1) if odd == 0 else (usual, unusual, 2)
    texts = set(trio(refused, kind, odd))
    assert len(texts) == 1
    pattern = (
        f"the models differ: rank 0 has {re.escape(zero)}.*; rank {rank} has {re.escape(other)}"
    )
    assert re.match(pattern, texts.pop())


def refused_for_length(world, shorter):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2, bias=world.rank != shorter)]
    with pytest.raises(RuntimeError) as caught:
        broadcast_parameters(nn.Sequential(*layers))
    return str(caught.value)


@pytest.mark.parametrize(
    ("shorter", "text"),
    [
        (0, "rank 0 has 3 parameters and buffers, rank 1 has 4; only rank 1 has parameter 1.bias:"),
        (2, "rank 0 has 4 parameters and buffers, rank 2 has 3; only rank 0 has parameter 1.bias:"),
    ],
)
def test_a_model_that_ends_early_is_refused_with_one_text_on_every_rank(trio, shorter, text):
    texts = set(trio(refused_for_length, shorter))
    assert len(texts) == 1
    assert texts.pop().startswith(f"the models differ: {text}")


def compare_values(world):
    check_same_model(Zoo(world.rank))


def test_values_may_differ(trio):
    trio(compare_values)


def refuse_lazy(world, lazy_ranks):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    if world.rank not in lazy_ranks:
        model(torch.zeros(1, 2))
    with pytest.raises((ValueError, RuntimeError), match=r"parameter 1.weight.* lazy"):
        broadcast_parameters(model)


def test_lazy_modules_are_refused(trio):
    trio(refuse_lazy, (0, 1, 2))


def test_a_module_that_is_lazy_on_one_rank_is_refused_on_every_rank(trio):
    trio(refuse_lazy, (1,), limit=10)


def refuse_lazy_buffer(world):
    with pytest.raises(ValueError, match=r"buffer running_mean.* lazy"):
        broadcast_parameters(nn.LazyBatchNorm1d(affine=False))


def test_lazy_buffers_are_refused(trio):
    trio(refuse_lazy_buffer)


def test_objects_go_through_the_modules_own_gpu(monkeypatch):
    """Not the current one, which is the machine's first where a program has chosen none."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device) or nullcontext())
    with on_gpu_of(nn.Linear(2, 2)), on_gpu_of(nn.Module()):
        assert not chosen
    module = nn.Module()
    on_second = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(module, "parameters", lambda: iter([on_second]))
    with on_gpu_of(module):
        assert chosen == [torch.device("cuda", 1)]
