"""Virtual ranks of a rank in lock step, for synchronised batch norm."""

from functools import partial

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from tests.support.on_ranks import on


def network():
    torch.manual_seed(3)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5)
    return nn.Sequential(*layers, nn.Linear(5, 1)).double()


@on("gloo-3")
def test_a_step_is_that_of_one_process_with_the_whole_batch(world):
    ours, whole = ddp.convert_sync_batchnorm(network()), network()
    reducer = ddp.Reducer(ours, virtual_ranks=8)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, whole)]
    for step in range(3):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        reducer.run_virtual_ranks(
            lambda virtual_rank, x=x: ours(x.chunk(8)[virtual_rank]).exp().mean().backward()
        )
        whole.zero_grad()
        whole(x).exp().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), whole.state_dict(), rtol=1e-10, atol=1e-10)


def test_virtual_ranks_that_differ(alone):
    model = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2))
    ddp.convert_sync_batchnorm(model)
    reducer = ddp.Reducer(model, virtual_ranks=4, find_unused_parameters=True)

    def run(virtual_rank, odd, width=2, twice=False):
        outputs = model[0](torch.ones(3, width if virtual_rank == odd else 2))
        (model[1](outputs) if virtual_rank == odd and width == 2 else outputs).sum().backward()
        if twice and virtual_rank == odd:
            model[0](torch.ones(3, 2))

    differ = "virtual ranks of this rank differ in their synchronised batch norms"
    for options, text in (
        ({"odd": 0}, differ),
        ({"odd": 0, "twice": True}, differ),
        ({"odd": 3, "width": 3}, "running_mean should contain 3 elements not 2"),
    ):
        with pytest.raises(RuntimeError, match=text):
            reducer.run_virtual_ranks(partial(run, **options))
    reducer.run_virtual_ranks(partial(run, odd=None))
