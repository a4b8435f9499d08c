"""Programs of torch's own on the mpi backend: two ranks compute what one process computes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_from_scratch import mpi

STEPS = 3


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batches():
    """The whole batch of each step: 8 rows, of which rank r takes every n-th from the r-th on."""
    torch.manual_seed(1)
    return [torch.randn(8, 6) for _ in range(STEPS)]


def train(model, optimizer, inputs):
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def trained_by_one_process(make_optimizer):
    model = network()
    train(model, make_optimizer(model.parameters()), batches())
    return model.state_dict()


def own_rows(world):
    return [x[world.rank :: world.world_size] for x in batches()]


def assert_equal_states(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.fixture
def crew(ranks):
    return ranks("mpi", 2)


def distributed_data_parallel(world, as_view):
    model = torch.nn.parallel.DistributedDataParallel(
        network(), bucket_cap_mb=0.0005, gradient_as_bucket_view=as_view
    )
    train(model, sgd(model.parameters()), own_rows(world))
    assert_equal_states(model.module.state_dict(), trained_by_one_process(sgd))


@pytest.mark.parametrize("as_view", [False, True])
def test_distributed_data_parallel(crew, as_view):
    crew(distributed_data_parallel, as_view)


def sampler(world):
    """An epoch of shuffled data: the batches of both ranks together train one process alike."""
    rows = torch.arange(24.0).view(12, 2)
    order = DistributedSampler(rows, shuffle=True, seed=5)
    order.set_epoch(1)
    loader = DataLoader(TensorDataset(rows), batch_size=3, sampler=order)
    torch.manual_seed(0)
    alone = torch.nn.Linear(2, 1)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    mine = [x for (x,) in loader]
    train(model, torch.optim.SGD(model.parameters(), lr=1e-4), mine)
    everyone = [None] * world.world_size
    dist.all_gather_object(everyone, mine)
    assert sorted(x for part in everyone for x in torch.cat(part)[:, 0].tolist()) == list(
        range(0, 24, 2)
    )
    together = [torch.cat(parts) for parts in zip(*everyone, strict=True)]
    train(alone, torch.optim.SGD(alone.parameters(), lr=1e-4), together)
    assert_equal_states(model.module.state_dict(), alone.state_dict())


def test_distributed_sampler(crew):
    crew(sampler)


def zero_redundancy_optimizer(world):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns, on torch 2.11

    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, own_rows(world))
    assert_equal_states(model.module.state_dict(), trained_by_one_process(adam))
    # Each rank holds the state of some of the parameters; rank 0 can gather it whole.
    assert 0 < len(optimizer.optim.state) < len(list(model.parameters()))
    optimizer.consolidate_state_dict(to=0)
    if world.rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_zero_redundancy_optimizer(crew):
    crew(zero_redundancy_optimizer)


def sharded_network(mesh):
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def fully_sharded(world):
    model = sharded_network(init_device_mesh("cpu", (world.world_size,)))
    own = sum(p.to_local().numel() for p in model.parameters())
    assert own < sum(p.numel() for p in model.parameters())
    train(model, adam(model.parameters()), own_rows(world))
    assert_equal_states(whole(model), trained_by_one_process(adam))


def test_fully_shard(crew):
    crew(fully_sharded)


def checkpoint(world, folder):
    mesh = init_device_mesh("cpu", (world.world_size,))
    model = sharded_network(mesh)
    train(model, sgd(model.parameters()), own_rows(world))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    # Into a sharded model, and into a whole one.
    loaded = sharded_network(mesh)
    dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder)
    assert_equal_states(whole(loaded), whole(model))
    alone = network()
    dcp.load({"model": alone.state_dict()}, checkpoint_id=folder)
    assert_equal_states(alone.state_dict(), trained_by_one_process(sgd))
    future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/later")
    future.result()


def test_distributed_checkpoint(crew, tmp_path):
    crew(checkpoint, str(tmp_path))


def sharded_tensors(world):
    n = world.world_size
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("data",))
    torch.manual_seed(2)
    a, b = torch.randn(6, 4), torch.randn(4, 6)
    rows, columns = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)])
    torch.testing.assert_close(
        (rows @ columns.redistribute(mesh, [Replicate()])).full_tensor(), a @ b
    )
    inner = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    assert inner.placements == (Partial(),)
    torch.testing.assert_close(inner.redistribute(mesh, [Shard(0)]).full_tensor(), a @ b)
    assert rows.redistribute(mesh, [Shard(1)]).to_local().equal(a.chunk(n, 1)[world.rank])
    grid = init_device_mesh("cpu", (1, n), mesh_dim_names=("replicate", "shard"))
    assert grid["shard"].get_group().size() == n


def test_tensors_and_meshes(crew):
    crew(sharded_tensors)


def gloo_beside_mpi(world):
    everyone, first = dist.new_group(backend="gloo"), dist.new_group([0], backend="gloo")
    by_mpi = dist.new_group()
    for group, backend in ((everyone, "gloo"), (by_mpi, mpi.BACKEND), (None, mpi.BACKEND)):
        assert dist.get_backend(group) == backend
        tensor = torch.tensor([world.rank + 1.0])
        handle = dist.all_reduce(tensor, group=group, async_op=True)
        handle.wait()
        assert tensor.item() == 3
    if world.rank == 0:
        dist.barrier(group=first)
    dist.monitored_barrier(everyone)
    for group in (everyone, by_mpi):
        dist.destroy_process_group(group)


def test_a_gloo_group_beside_mpi(crew):
    crew(gloo_beside_mpi)


def pipeline(world):
    """Two stages; the tag is the number of the part of the batch, and parts arrive backwards."""
    model, inputs = network(), torch.arange(48.0).view(8, 6) / 48
    parts = inputs.chunk(4)
    if world.rank == 0:
        stage = model[:2]
        hidden = [stage(x) for x in parts]
        handles = [dist.isend(h.detach(), dst=1, tag=i) for i, h in enumerate(hidden)]
        gradient = torch.empty(2, 16)
        for i in reversed(range(4)):
            dist.recv(gradient, src=1, tag=10 + i)
            hidden[i].backward(gradient)
        for handle in handles:
            handle.wait()
    else:
        stage = model[2:]
        for i in reversed(range(4)):
            h = torch.empty(2, 16)
            dist.recv(h, src=0, tag=i)
            stage(h.requires_grad_()).square().sum().backward()
            dist.send(h.grad, dst=0, tag=10 + i)
    alone = network()
    alone(inputs).square().sum().backward()
    for ours, theirs in zip(
        stage.parameters(), (alone[:2], alone[2:])[world.rank].parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_pipeline_of_tagged_messages(crew):
    crew(pipeline)


def torchs_pipeline(world):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, inputs = network(), torch.arange(48.0).view(8, 6) / 48
    stage = PipelineStage((model[:2], model[2:])[world.rank], world.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, 4, loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False
    )
    if world.rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=torch.ones(8, 3))
    alone = network()
    (alone(inputs) - 1).square().sum().backward()
    own, theirs = (m.parameters() for m in (stage.submod, (alone[:2], alone[2:])[world.rank]))
    for ours, expected in zip(own, theirs, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_torchs_pipeline(crew):
    crew(torchs_pipeline)
