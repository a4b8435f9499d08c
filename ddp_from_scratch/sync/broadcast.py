"""Compares the ranks' models, and sends rank 0's parameters and buffers to all."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.core.layout import assign
from ddp_from_scratch.core.memory import sparse_parameters, split_like
from ddp_from_scratch.group import check_group, of_member, on_gpu_of

# Approximate. Small beside a model, of which there is no second copy.
_MESSAGE_BYTES = 16 * 2**20

_LAZY = " is lazy and has no shape yet"


def broadcast_parameters(
    module: torch.nn.Module,
    src: int = 0,
    process_group: dist.ProcessGroup | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Gives every rank the parameters and buffers of rank `src`, bit for bit. Collective.

    All ranks compare their models first. Then the tensors are sent in flat messages by dtype.

    Args:
        module: the model; its tensors keep their storage, shape, strides and device.
        src: the rank, within the group, to copy from.
        process_group: the ranks that take part; None means all.
        ignore: names of parameters and buffers that are neither compared nor copied.

    Raises:
        ValueError: `src` is not a rank of the group, or a parameter or buffer is lazy.
        RuntimeError: the models differ in number, names, order, shapes, strides, dtypes,
            requires_grad or sparseness of gradients of parameters or buffers. The text names the
            first difference and the two ranks, and is the same on every rank.
    """
    _check_rank(src, process_group)
    _check_same_model(module, process_group, ignore)
    named = [*module.named_parameters(), *module.named_buffers()]
    send_tensors([t for name, t in named if name not in ignore], src, process_group)


def broadcast_buffers(
    module: torch.nn.Module,
    src: int = 0,
    process_group: dist.ProcessGroup | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Gives every rank the buffers of rank `src`, such as running statistics. Collective.

    Without `broadcast_buffers=True` in the Reducer, call it before an evaluation or a checkpoint.
    Arguments as for `broadcast_parameters`.

    Raises:
        ValueError: `src` is not a rank of the group.
    """
    _check_rank(src, process_group)
    buffers = [buffer for name, buffer in module.named_buffers() if name not in ignore]
    send_tensors(buffers, src, process_group)


def _check_same_model(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None, ignore: Collection[str]
) -> None:
    def everyones(mine: Any) -> list[Any]:
        found = [None] * dist.get_world_size(process_group)
        with on_gpu_of(module):
            dist.all_gather_object(found, mine, group=process_group)
        return found

    mine = _describe(module, ignore)
    # Equal ranks exchange 32 bytes each. The long descriptions are sent only to name a difference.
    digests = everyones(hashlib.sha256("\n".join(mine).encode()).digest())
    if len(set(digests)) == 1:
        # A rank that raised before the exchange would leave the others waiting.
        for line in mine:
            if line.endswith(_LAZY):
                remedy = "run one forward pass on every rank before broadcast_parameters"
                raise ValueError(f"{line}: {remedy}")
        return
    descriptions = everyones(mine)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    rows = zip_longest(descriptions[0], descriptions[other], fillvalue="nothing more")
    zero, theirs = next((ours, theirs) for ours, theirs in rows if ours != theirs)
    raise RuntimeError(f"the models differ: rank 0 has {zero}; rank {other} has {theirs}")


def _describe(module: torch.nn.Module, ignore: Collection[str]) -> list[str]:
    sparse = sparse_parameters(module)

    def line(kind: str, name: str, tensor: torch.Tensor) -> str:
        if torch.nn.parameter.is_lazy(tensor):
            return f"{kind} {name}{_LAZY}"
        shape = f"{kind} {name}: shape {tuple(tensor.shape)}"
        if kind == "buffer":
            return f"{shape}, {tensor.dtype}"
        end = ", sparse gradient" if id(tensor) in sparse else ""
        trains = f"requires_grad={tensor.requires_grad}"
        return f"{shape}, strides {tensor.stride()}, {tensor.dtype}, {trains}{end}"

    found = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    return [line(k, n, t) for k, named in found.items() for n, t in named if n not in ignore]


def _check_rank(src: int, process_group: dist.ProcessGroup | None) -> None:
    check_group(process_group)
    world_size = dist.get_world_size(process_group)
    if not 0 <= src < world_size:
        raise ValueError(f"src must be a rank of the group, 0 to {world_size - 1}, got {src}")


def send_tensors(
    tensors: Sequence[torch.Tensor], src: int, process_group: dist.ProcessGroup | None
) -> None:
    """Sends rank `src`'s values to all. Shapes must be equal on every rank."""
    for members, flat, work in broadcasts(tensors, src, process_group):
        work.wait()
        if dist.get_rank(process_group) != src:
            for tensor, values in zip(members, split_like(flat, members), strict=True):
                tensor.detach().copy_(values)


def broadcasts(
    tensors: Sequence[torch.Tensor], src: int, process_group: dist.ProcessGroup | None
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, dist.Work]]:
    """Starts one broadcast for each message: tensors of one dtype and device, in a flat tensor.

    Yields the message's tensors, their values, and the work.
    """
    sizes = [(t.nbytes, (t.dtype, t.device)) for t in tensors]
    for indices in assign(sizes, range(len(tensors)), [_MESSAGE_BYTES]):
        members = [tensors[index] for index in indices]
        if not any(tensor.numel() for tensor in members):
            continue
        if dist.get_rank(process_group) == src:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in members])
        else:
            flat = members[0].new_empty(sum(tensor.numel() for tensor in members))
        wire = flat.view(torch.uint8)  # every backend can send bytes
        work = dist.broadcast(wire, group=process_group, group_src=src, async_op=True)
        yield members, flat, of_member(work)
