from importlib import import_module

import pytest
import torch
import torch.distributed as dist

program = import_module("tutorial.17_accumulate.accumulate")


def test_bytes_sent(exercise):
    assert exercise.bytes_sent(1000, 4, 10, sync_every_pass=True) == 40_000
    assert exercise.bytes_sent(1000, 4, 10, sync_every_pass=False) == 10_000


def loss_of(model, part):
    return (model(part) - 1).square().mean()


def batch_of(rank):
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(rank))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def gradients(exercise, sizes):
    model = make_model()
    parallel = program.Accumulating(model, 0)
    batch = batch_of(dist.get_rank())
    exercise.accumulate(model, parallel, loss_of, batch.split(sizes))
    sent = sum(parallel.sent)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), sent, parallel.sync


@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 4, 2), (12,)], ids=str)
def test_accumulate(on_ranks, sizes):
    model = make_model()
    loss_of(model, torch.cat([batch_of(0), batch_of(1)])).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for found, sent, sync in on_ranks(2, gradients, sizes):
        said = f"parts of {sizes} examples: not the gradient of one batch; does each example count"
        assert torch.allclose(found, expected, atol=1e-6), f"{said} the same?"
        assert sent == expected.nbytes, "bytes sent, and bytes of the gradients"
        assert sync, "the switch is off at the end"
