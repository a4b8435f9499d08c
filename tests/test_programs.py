"""Programs of torch's own on the mpi backend: two ranks compute what one process computes."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 3


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def train(model, optimizer, rank=0, world_size=1):
    """Of each batch of 8 rows rank r takes every n-th from the r-th on."""
    torch.manual_seed(1)
    for batch in [torch.randn(8, 6) for _ in range(STEPS)]:
        optimizer.zero_grad()
        model(batch[rank::world_size]).square().mean().backward()
        optimizer.step()


def trained_by_one_process():
    model = network()
    train(model, adam(model.parameters()))
    return model.state_dict()


def assert_equal_states(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=lambda text, n=name: f"{n}: {text}")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def zero_redundancy_optimizer(world, folder):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns, on torch 2.11

    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, world.rank, 2)
    assert_equal_states(model.module.state_dict(), trained_by_one_process())
    # Each rank holds the state of some of the parameters; rank 0 can gather it whole.
    assert 0 < len(optimizer.optim.state) < len(list(model.parameters()))
    optimizer.consolidate_state_dict(to=0)
    if world.rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def sharded_network(mesh):
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def fully_sharded_and_checkpointed(world, folder):
    mesh = init_device_mesh("cpu", (2,))
    model = sharded_network(mesh)
    own = sum(p.to_local().numel() for p in model.parameters())
    assert own < sum(p.numel() for p in model.parameters())
    train(model, adam(model.parameters()), world.rank, 2)
    assert_equal_states(whole(model), trained_by_one_process())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    # Into a sharded model, and into a whole one.
    loaded, alone = sharded_network(mesh), network()
    dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": alone.state_dict()}, checkpoint_id=folder)
    assert_equal_states(whole(loaded), whole(model))
    assert_equal_states(alone.state_dict(), whole(model))
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/later").result()


def pipeline(world, folder):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, inputs = network(), torch.arange(48.0).view(8, 6) / 48
    own = (model[:2], model[2:])[world.rank]
    stage = PipelineStage(own, world.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, 4, loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False
    )
    schedule.step(inputs) if world.rank == 0 else schedule.step(target=torch.ones(8, 3))
    alone = network()
    (alone(inputs) - 1).square().sum().backward()
    theirs = (alone[:2], alone[2:])[world.rank]
    for ours, expected in zip(own.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_programs_of_torchs_own(ranks, tmp_path):
    crew = ranks("mpi", 2)
    for program in (zero_redundancy_optimizer, fully_sharded_and_checkpointed, pipeline):
        crew(program, str(tmp_path))
