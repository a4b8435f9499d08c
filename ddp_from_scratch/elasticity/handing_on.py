"""One rank's state for the ranks that join it."""

import io
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.group import of_member
from ddp_from_scratch.waiting import wait


def hand_on(state: Any, source: int) -> Any:
    """Returns the state of rank `source` of the default group; the others' is ignored. Collective.

    As `broadcast_object_list`, but its waits end when a rank is lost.
    """
    is_source = dist.get_rank() == source
    file = io.BytesIO()
    if is_source:
        torch.save(state, file)
    size = torch.tensor([file.tell()])
    wait(of_member(dist.broadcast(size, source, async_op=True)))
    data = bytearray(file.getvalue()) if is_source else bytearray(int(size))
    # Shares the memory of `data`.
    wire = torch.frombuffer(data, dtype=torch.uint8)
    wait(of_member(dist.broadcast(wire, source, async_op=True)))
    # By this run's own hand: not only tensors.
    return state if is_source else torch.load(io.BytesIO(data), weights_only=False)
