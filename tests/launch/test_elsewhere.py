"""Programs written for torch's class, with other people's libraries, where one name is exchanged.

Each runs twice on the same ranks, with ours and with torch's own class on gloo: the same numbers,
and no rank drifts.
"""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_from_scratch as ddp

STEPS = 4


def in_both(world, program):
    """The parameters after `program(world)` with ours, and after it with torch's."""
    results = []
    for class_ in (ddp.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        with patch.object(torch.nn.parallel, "DistributedDataParallel", class_):
            model, told = program(world)
        ddp.check_sync(model)
        results.append((torch.cat([p.detach().flatten() for p in model.parameters()]), told))
    (ours, our_told), (theirs, their_told) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert our_told == pytest.approx(their_told, rel=1e-4)
    return our_told


def accelerated(world):
    """Hugging Face accelerate: accumulation, clipping, a scheduler, sharded data, gathered."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch.utils.data import DataLoader, TensorDataset

    kwargs = DistributedDataParallelKwargs(bucket_cap_mb=1, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[kwargs])
    assert accelerator.num_processes == world.world_size
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)
    )
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4), scheduler
    )
    assert type(model) is torch.nn.parallel.DistributedDataParallel
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach().reshape(1)).tolist()
    return accelerator.unwrap_model(model), losses


def timm_training(name):
    def program(world):
        import timm
        from timm.optim import create_optimizer_v2
        from timm.utils import ModelEmaV3, dispatch_clip_grad, distribute_bn, reduce_tensor

        torch.manual_seed(world.rank)
        model = timm.create_model(name, num_classes=5, pretrained=False)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = create_optimizer_v2(wrapped, opt="lamb", lr=0.01)
        average = ModelEmaV3(model, decay=0.5)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(10 * step + world.rank)
            x, y = torch.randn(2, 3, 64, 64), torch.randint(5, (2,))
            optimizer.zero_grad()
            loss = cross_entropy(wrapped(x), y)
            loss.backward()
            dispatch_clip_grad(wrapped.parameters(), 1.0)
            optimizer.step()
            average.update(model)
            losses.append(reduce_tensor(loss.detach(), world.world_size).item())
        distribute_bn(wrapped, world.world_size, True)
        ddp.check_sync(average.module)
        return model, losses

    return program


def with_accelerate(world):
    return in_both(world, accelerated)


def with_timm(world):
    for name in ("test_resnet", "test_vit"):
        in_both(world, timm_training(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "called", "backend"),
    [("accelerate", with_accelerate, "mpi"), ("timm", with_timm, "gloo")],
)
def test_the_same_numbers_as_with_torchs_class(ranks, package, called, backend):
    pytest.importorskip(package)
    first, second = ranks(backend, 2, fresh=True)(called)
    assert first == second
