"""The state that a rank takes over from another one."""

import torch
import torch.distributed as dist

from ddp_from_scratch.world.elastic import broadcast_state
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
        found = broadcast_state([*flat.split(256)] if world.rank == 0 else None, 0)
    assert torch.equal(torch.cat(found), flat)
    assert flat.nbytes < sum(sent + by_torch) < 1.5 * flat.nbytes
    state = {"step": torch.tensor(3), "mine": OfAProgram()}
    if world.rank == 0:
        assert broadcast_state(state, 0) is state
    else:
        told = "holds tests.elastic.test_state.OfAProgram, which torch.load refuses"
        assert told in refusal(broadcast_state, None, 0)
