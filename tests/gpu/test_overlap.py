"""On a simulated GPU with both of torch's NCCL classes: the order of streams, and the numbers."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])


def batch(step, rank):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def hook_of_a_user(state, bucket):
    work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def one_step(world, hook):
    from tests.support.simgpu import device, trace

    module = model().to("cuda")
    reducer = ddp.Reducer(module, bucket_cap_mb=0.02)
    if hook is not None:
        reducer.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(number):
        optimizer.zero_grad()
        module(batch(number, world.rank).to("cuda")).square().mean().backward()
        optimizer.step()

    for number in range(2):
        step(number)
    device.clear()
    step(2)
    found = trace.stalls(), trace.faults(), trace.host_waits(), len(reducer.stats().bucket_bytes)
    reducer.remove()
    return [p.cpu().tolist() for p in module.parameters()], found


def alone():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        halves = [module(batch(number, rank)).square().mean() / 2 for rank in range(2)]
        sum(halves).backward()
        optimizer.step()
    return [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize(
    "hook",
    [None, ddp.comm_hooks.allreduce_hook, ddp.comm_hooks.bf16_compress_hook, hook_of_a_user],
    ids=["none", "allreduce", "bf16", "of a user"],
)
def test_backward_waits_for_no_collective(sim, hook):
    for parameters, (stalls, faults, host_waits, buckets) in sim(one_step, hook):
        assert (stalls, faults, host_waits) == (0, [], [])
        assert buckets > 2
        rtol = 1e-2 if hook is ddp.comm_hooks.bf16_compress_hook else 1e-5
        torch.testing.assert_close(parameters, alone(), rtol=rtol, atol=1e-5)


def stalls_on_one_stream(world):
    from ddp_from_scratch import gpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "aside", lambda device: nullcontext())
        return one_step(world, None)[1][0]


def test_a_future_of_nccl2_would_hold_up_backward(nccl2):
    assert all(nccl2(stalls_on_one_stream))


def kernels_of_packing(world):
    from tests.support.simgpu import device

    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, size, padding=size // 2) for size in (1, 3, 1, 3)]
    module = nn.Sequential(*layers).to("cuda").to(memory_format=torch.channels_last)
    for layer in module[::2]:  # as cuDNN's gradients of 1 x 1 convolutions are
        layer.weight.register_hook(lambda grad: grad.as_strided(grad.shape, (8, 1, 1, 1)))
    reducer = ddp.Reducer(module)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = None
        device.clear()
        images = torch.randn(2, 8, 4, 4).to("cuda").contiguous(memory_format=torch.channels_last)
        module(images).sum().backward()
    found = [o.name for o in device.OPERATIONS if o.place.startswith("core/bucket.py")]
    reducer.remove()
    return found


def test_gradients_of_other_strides_do_not_slow_down_the_rest(sim):
    for names in sim(kernels_of_packing):
        assert names.count("aten::_foreach_copy_") == 2  # into the buffer and out of it
        assert names.count("aten::copy_") == 4  # two weights of size 1 x 1
