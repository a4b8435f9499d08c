"""What asks `isinstance(x, torch.nn.parallel.DistributedDataParallel)`, and then takes x for it.

On the mpi backend, which these programs of torch's use for all that they send.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as Theirs

from ddp_from_scratch import DistributedDataParallel as Ours
from tests.support.on_ranks import on


def test_it_passes_for_torchs_class_and_inherits_nothing_from_it():
    assert issubclass(Ours, Theirs)
    assert Theirs not in Ours.__mro__


def sharded(net):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


WRAPPERS = {"ours": Ours, "torch": Theirs, "fully_shard": sharded}


def trained(wrap, seed):
    torch.manual_seed(seed)
    model = wrap(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4) * seed).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return weights, moments["state"]


@pytest.mark.parametrize(("source", "target"), [("ours", "torch"), ("fully_shard", "ours")])
@on("mpi-2")
def test_distributed_checkpoints_go_both_ways(world, tmp_path, source, target):
    model, optimizer = trained(WRAPPERS[source], 1)
    saved = whole(model, optimizer)
    torch.testing.assert_close(saved, whole(*trained(lambda net: net, 1)))  # as one process
    weights, moments = get_state_dict(model, optimizer)
    assert not any(key.startswith("module.") for key in weights)
    dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path).result()
    model, optimizer = trained(WRAPPERS[target], 2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    torch.testing.assert_close(whole(model, optimizer), saved, rtol=0, atol=0)
    if target == "ours":
        assert get_model_state_dict(model).keys() == model.module.state_dict().keys()


def pipelined(world, class_, unused):
    """A pipeline of one stage on each rank, whose micro-batches accumulate; averaged over ranks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups = [dist.new_group([rank]) for rank in range(world.world_size)]
    torch.manual_seed(0)
    model = class_(nn.Linear(4, 2), find_unused_parameters=unused)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[world.rank])
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(world.rank)
    for _ in range(3):
        model.zero_grad()
        schedule.step(torch.randn(8, 4), target=torch.randn(8, 2))
    return [p.grad for p in model.parameters()]


@on("gloo-2")
def test_a_stage_of_a_pipeline(world):
    # torch's class fails without find_unused_parameters: it counts each micro-batch's gradients.
    theirs = pipelined(world, Theirs, True)
    for unused in (False, True):
        torch.testing.assert_close(pipelined(world, Ours, unused), theirs)


def zero_in_a_hook(world, class_, make):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    model = class_(net, bucket_cap_mb=2e-4)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    model.register_comm_hook(None, make(allreduce_hook, model, zero))
    torch.manual_seed(world.rank)
    for _ in range(5):
        zero.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
    assert model._has_rebuilt_buckets
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@on("mpi-2")
def test_zeros_step_inside_the_comm_hook(world):
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    theirs = zero_in_a_hook(world, Theirs, ddp_zero_hook.hook_with_zero_step)
    for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        assert torch.equal(zero_in_a_hook(world, Ours, make), theirs)


def in_a_mesh(world, class_):
    from torch.distributed.tensor import parallel

    mesh = dist.init_device_mesh("cpu", (world.world_size, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(net, mesh["tp"], plan)
    model = class_(net, device_mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(world.rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("crew", ["mpi-2", "node-2"], indirect=True)
@on("crew")
def test_a_mesh_of_two_dimensions(world):
    assert torch.equal(in_a_mesh(world, Ours), in_a_mesh(world, Theirs))
