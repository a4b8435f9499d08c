"""The state that a rank takes over from another one, and what all ranks learn in a step."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch.world.elastic import Membership
from tests.support.on_ranks import on
from tests.support.refusal import refusal
from tests.support.terms import recorded


class OfAProgram:
    """What runs code when it is unpickled."""


@on("gloo-2")
def test_a_state_is_sent_as_plain_values_and_once_though_its_tensors_share_memory(world):
    """A pickle would hold the whole flat tensor for each parameter in it."""
    flat = torch.arange(2.0**16)
    with recorded("broadcast") as sent, recorded("broadcast", dist.distributed_c10d) as by_torch:
        found = ddp.broadcast_state([*flat.split(256)] if world.rank == 0 else None, 0)
    assert torch.equal(torch.cat(found), flat)
    assert flat.nbytes < sum(sent + by_torch) < 1.5 * flat.nbytes
    state = {"step": torch.tensor(3), "mine": OfAProgram()}
    if world.rank == 0:
        assert ddp.broadcast_state(state, 0) is state
    else:
        told = "holds tests.elastic.test_state.OfAProgram, which torch.load refuses"
        assert told in refusal(ddp.broadcast_state, None, 0)


@on("gloo-2")
def test_without_an_agent_ranks_regroup_once_and_take_over_what_rank_0_has_read(world):
    model, seen = torch.nn.Linear(2, 2), []
    torch.nn.init.constant_(model.weight, world.rank)
    reducer = ddp.Reducer(model, virtual_ranks=2)
    optimizer = ddp.SGD(model.parameters(), reducer=reducer, lr=0.1 * (world.rank + 1))

    def read(has_state):
        seen.append(has_state)
        run.step = 3 if world.rank == 0 else 0

    run = ddp.elastic(world, reducer, optimizer, on_regroup=read)
    assert run.repeat(lambda: seen[:]) == run.repeat(lambda: seen[:]) == [False]
    assert (run.step, optimizer.param_groups[0]["lr"]) == (3, 0.1)
    assert torch.equal(model.weight, torch.zeros(2, 2))
    for attempt in run.attempts(4):
        with attempt:
            reducer.run_virtual_ranks(lambda _: model(torch.ones(2, 2)).sum().backward())
            optimizer.step()
    with pytest.raises(RuntimeError, match="steps twice in one attempt"):
        optimizer.step()


@on("gloo-2")
def test_flags_travel_in_the_exchange_that_ends_a_group(world):
    model = torch.nn.Linear(2, 2)
    reducer = ddp.Reducer(model, virtual_ranks=2)
    run = ddp.elastic(world, reducer, torch.optim.SGD(model.parameters()))
    assert run.exchange(world.rank, 3 - world.rank)() == [1, 3]
    with patch.object(Membership, "is_over", world.rank == 0):
        with pytest.raises(ddp.CommunicationError, match="processes are to join the group"):
            run.exchange(0)()
        assert run.exchange(world.rank)() == [1]  # a flag that is set comes first
