"""Programs on a simulated GPU that an earlier version of the library broke."""

import contextlib
import io
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from tests.support.fuzz_case import watched


def normed():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    return ddp.convert_sync_batchnorm(module).to("cuda")


def step(module):
    module(torch.randn(4, 8).to("cuda")).square().mean().backward()


def spoiled_captures(world):
    """Of a graph, beside a stall watch and beside a thread that asks an event."""
    from ddp_from_scratch.watch import stall
    from tests.support.simgpu.device import GUARD

    looks, look = threading.Semaphore(0), stall.StallWatch._look
    module = normed()
    printed = contextlib.redirect_stderr(io.StringIO())
    with printed as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stall.StallWatch, "_look", lambda self: looks.release() or look(self))
        reducer = ddp.Reducer(module, stall_after=0.3)
        for _ in range(2):
            step(module)
        torch.accelerator.synchronize()
        GUARD.capture(True)
        for _ in range(6):  # longer than a report takes
            assert looks.acquire(timeout=30)
        beside_the_watch = GUARD.capture(False)
        reducer.remove()
    assert "has waited" not in told.getvalue()  # all buckets have landed
    event = torch.Event("cuda")
    event.record(torch.accelerator.current_stream())
    GUARD.capture(True)
    with pytest.raises(RuntimeError, match="capturing"):
        event.query()
    return beside_the_watch, GUARD.capture(False)


def test_a_capture_is_not_spoiled_by_the_stall_watch(sim):
    assert sim(spoiled_captures) == [(False, True)] * 2


def in_a_group_of_another_name(world):
    from tests.support.simgpu import nccl

    nccl.install(dist.group.WORLD.kind, "nccl-other")
    group = dist.new_group(backend="nccl-other")
    module = normed()
    reducer = ddp.Reducer(module, process_group=group, check_every=1)
    for _ in range(2):
        step(module)
    reducer.remove()
    ddp.check_sync(module, process_group=group)
    dist.destroy_process_group(group)


def test_nccl_by_another_name(sim):
    sim(in_a_group_of_another_name)


def beside_gloo(world):
    """Of a model on the GPU, and one whose first layer is on the CPU."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl-part")
    module = normed()
    torch.manual_seed(world.rank)
    with watched(world.device) as found:
        reducer = ddp.Reducer(module, process_group=group, find_unused_parameters=True)
        for _ in range(3):
            step(module)
    reducer.remove()
    torch.manual_seed(0)
    both = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8).to("cuda")])
    torch.manual_seed(world.rank)
    reducer = ddp.Reducer(both, process_group=group)
    for _ in range(3):
        both[1](both[0](torch.randn(4, 8)).to("cuda")).square().mean().backward()
    reducer.remove()
    averaged = [*module.parameters(), *both.parameters()]
    sums = [parameter.grad.sum().item() for parameter in averaged]
    dist.destroy_process_group(group)
    return found, sums


def test_a_group_with_gloo_for_the_cpu(sim):
    (faults, sums), other = sim(beside_gloo)
    assert (faults, sums) == ([], other[1])


def late_loss(world):
    from ddp_from_scratch.training.coordination import LossWatch, as_number

    watch = LossWatch(world.rank, world.device)
    nan, good = (torch.tensor(loss).to("cuda") for loss in (float("nan"), 1.0))
    watch.see(nan, 5)
    early = watch.known()
    watch.see(good, 6)
    return early, watch.known() == watch.settled() == as_number(5, world.rank)


def test_a_loss_that_is_not_finite_is_known_when_the_copy_has_arrived(nccl2):
    assert nccl2(late_loss) == [(0, True)] * 2


def uneven_batches(world):
    from tests.support.simgpu import trace

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to("cuda")
    reducer = ddp.Reducer(module, broadcast_buffers=True)
    with watched(world.device) as faults, ddp.join(reducer):
        for _ in range(2 + world.rank):
            step(module)
        waits = [wait for wait in trace.host_waits() if "torch_ddp/join.py" in wait]
    reducer.remove()
    return faults, waits


def test_join_does_not_wait_for_the_gpu_while_there_is_data(sim):
    assert sim(uneven_batches) == [([], [])] * 2


def kernels_of_a_checksum(world):
    from ddp_from_scratch.sync.check_sync import checksums
    from tests.support.simgpu import device

    tensor = torch.arange(20 * 2**16 + 5)
    on_gpu = tensor.to("cuda")
    device.clear()
    assert checksums([on_gpu]) == checksums([tensor])
    return sum(o.place.startswith("sync/check_sync.py") for o in device.OPERATIONS)


def test_a_checksum_takes_a_handful_of_kernels(nccl2):
    assert max(nccl2(kernels_of_a_checksum)) < 20
