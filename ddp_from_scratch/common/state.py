"""Sends a training state from one rank to all."""

import io
import re
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.common.arguments import check_src
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.common.group import wait


def broadcast_state(
    state: Any, src: int = 0, process_group: dist.ProcessGroup | None = None
) -> Any:
    """Returns rank `src`'s state, of tensors and plain values, on all ranks. Collective.

    Ranks read it with `torch.load(weights_only=True)`, so no rank runs code that another one sends.

    Args:
        state: an object that `torch.save` accepts; ignored on the other ranks.
        src: the rank, within the group, that sends its state.
        process_group: a group that takes CPU tensors; None means all ranks.

    Raises:
        UsageError: on the receiving ranks, if the state holds other objects than tensors and plain
            values.
        ValueError: `src` is not a rank of the group; a TypeError if it is no whole number.
        CommunicationError: a rank has left the group (see `wait`).
    """
    check_src(src, process_group)
    is_source = dist.get_rank(process_group) == src
    # A pickle would hold a flat tensor once for each parameter that is a window of it.
    file = io.BytesIO()
    if is_source:
        torch.save(state, file)
    size = torch.tensor([file.tell()], dtype=torch.int64, device="cpu")
    wait(dist.broadcast(size, group=process_group, group_src=src, async_op=True))
    data = file.getbuffer() if is_source else bytearray(int(size))
    wire = torch.frombuffer(data, dtype=torch.uint8)
    wait(dist.broadcast(wire, group=process_group, group_src=src, async_op=True))
    try:
        return state if is_source else torch.load(io.BytesIO(data), "cpu", weights_only=True)
    except UnpicklingError as error:
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UsageError(
            f"a state to send holds {kind[1] if kind else 'an object'}, which torch.load refuses "
            f"with weights_only=True: keep tensors and plain values in state_dict(), or name the "
            f"class with torch.serialization.add_safe_globals"
        ) from error
