"""Compares the ranks' models, and sends rank 0's parameters and buffers to all."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from ddp_from_scratch.common.group import check_group, gather_objects, on_gpu_of
from ddp_from_scratch.common.memory import sparse_parameters, split_like
from ddp_from_scratch.core.layout import assign

# Approximate. Small enough that a rank forwards one message while it receives the next.
_MESSAGE_BYTES = 16 * 2**20

# What some tensors are, and what to do.
_LAZY = (
    "is lazy and has no shape yet: run one forward pass on every rank before broadcast_parameters"
)
_EXPANDED = "is expanded: several of its elements share memory: clone() it on every rank"


def broadcast_parameters(
    module: torch.nn.Module,
    src: int = 0,
    process_group: dist.ProcessGroup | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Gives every rank the parameters and buffers of rank `src`, bit for bit. Collective.

    All ranks compare their models first. Then `send` and `recv` carry the tensors along a binomial
    tree rooted at `src`, in flat messages by dtype.

    Args:
        module: the model; its tensors keep their storage, shape, strides and device.
        src: the rank, within the group, to copy from.
        process_group: the ranks that take part; None means all.
        ignore: names of parameters and buffers that are neither compared nor copied.

    Raises:
        ValueError: `src` is not a rank of the group, or the module has lazy or expanded parameters
            or buffers.
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
        ValueError: `src` is not a rank of the group, or a buffer is expanded.
    """
    _check_rank(src, process_group)
    check_buffers(module, ignore)
    buffers = [buffer for name, buffer in module.named_buffers() if name not in ignore]
    send_tensors(buffers, src, process_group)


def _check_same_model(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None, ignore: Collection[str]
) -> None:
    mine = _describe(module, ignore)
    with on_gpu_of(module):
        # Equal ranks exchange 32 bytes each. Descriptions are sent only to name a difference.
        digests = gather_objects(hashlib.sha256("\n".join(mine).encode()).digest(), process_group)
        if len(set(digests)) == 1:
            # A rank that raised before the exchange would leave the others waiting.
            for line in mine:
                if line.endswith((_LAZY, _EXPANDED)):
                    raise ValueError(line)
            return
        descriptions = gather_objects(mine, process_group)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    zero, other = descriptions[0], descriptions[rank]
    ours, theirs = next(pair for pair in zip_longest(zero, other) if pair[0] != pair[1])
    raise RuntimeError(
        f"the models differ: rank 0 has {ours or f'only {len(zero)} parameters and buffers'}; "
        f"rank {rank} has {theirs or f'only {len(other)} parameters and buffers'}"
    )


def _describe(module: torch.nn.Module, ignore: Collection[str]) -> list[str]:
    sparse = sparse_parameters(module)

    def line(kind: str, name: str, tensor: torch.Tensor) -> str:
        if torch.nn.parameter.is_lazy(tensor):
            return f"{kind} {name} {_LAZY}"
        if _is_expanded(tensor):
            return f"{kind} {name} {_EXPANDED}"
        shape = f"{kind} {name}: shape {tuple(tensor.shape)}"
        if kind == "buffer":
            return f"{shape}, {tensor.dtype}"
        end = ", sparse gradient" if id(tensor) in sparse else ""
        trains = f"requires_grad={tensor.requires_grad}"
        return f"{shape}, strides {tensor.stride()}, {tensor.dtype}, {trains}{end}"

    found = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    return [line(k, n, t) for k, named in found.items() for n, t in named if n not in ignore]


def check_buffers(module: torch.nn.Module, ignore: Collection[str]) -> None:
    """Raises a ValueError for an expanded buffer, which no rank could receive."""
    for name, buffer in module.named_buffers():
        if name not in ignore and _is_expanded(buffer):
            raise ValueError(f"buffer {name} {_EXPANDED}")


def _is_expanded(tensor: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
        return False
    rows = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in rows)


def _check_rank(src: int, process_group: dist.ProcessGroup | None) -> None:
    check_group(process_group)
    world_size = dist.get_world_size(process_group)
    if not 0 <= src < world_size:
        raise ValueError(f"src must be a rank of the group, 0 to {world_size - 1}, got {src}")


def tree_neighbours(rank: int, world_size: int, root: int = 0) -> tuple[list[int], list[int]]:
    """Returns a rank's parent (none for the root) and children in the binomial tree.

    Counted from the root, r's parent is r without its lowest set bit. Eight ranks with root 0:

        0 ── 4 ── 6 ── 7
        │    └─── 5
        ├─── 2 ── 3
        └─── 1
    """
    relative = (rank - root) % world_size
    bit = 1
    while bit < world_size and not relative & bit:
        bit <<= 1
    parent = [(relative - bit + root) % world_size] if relative else []
    # The child with the largest subtree comes first, so that the longest path starts earliest.
    steps = [bit >> k for k in range(1, bit.bit_length())]
    return parent, [(relative + s + root) % world_size for s in steps if relative + s < world_size]


@torch.no_grad()
def send_tensors(
    tensors: Sequence[torch.Tensor], src: int, process_group: dist.ProcessGroup | None
) -> None:
    """Sends rank `src`'s values along the tree to all. Shapes must be equal on every rank."""
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    parent, children = tree_neighbours(rank, world_size, src)
    for members in messages(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in members])
        wire = flat.view(torch.uint8)  # every backend can send bytes
        # Receive, then send: in a tree no two ranks wait for each other.
        for way, peers in ((dist.irecv, parent), (dist.isend, children)):
            # In a batch, since nccl would otherwise open a communicator for each pair of ranks.
            steps = [dist.P2POp(way, wire, group=process_group, group_peer=peer) for peer in peers]
            for work in dist.batch_isend_irecv(steps) if steps else []:
                work.wait()
        if rank != src:
            for tensor, values in zip(members, split_like(flat, members), strict=True):
                tensor.copy_(values)


def messages(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Groups tensors into messages of one dtype and device, of about `_MESSAGE_BYTES`."""
    sizes = [(t.nbytes, (t.dtype, t.device)) for t in tensors]
    for members in assign(sizes, range(len(tensors)), [_MESSAGE_BYTES]):
        if any(tensors[index].numel() for index in members):
            yield [tensors[index] for index in members]
