"""A program written for torch's class, with accelerate, where one name is exchanged.

It runs twice on the same ranks, with ours and with torch's own class: the same numbers.
"""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_from_scratch as ddp


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


def with_accelerate(world):
    return in_both(world, accelerated)


@pytest.mark.slow
def test_the_same_numbers_as_with_torchs_class(ranks):
    pytest.importorskip("accelerate")
    first, second = ranks("mpi", 2, fresh=True)(with_accelerate)
    assert first == second
