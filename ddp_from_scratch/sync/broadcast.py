"""Compares the ranks' models, and sends rank 0's parameters and buffers to all."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, groupby, zip_longest

import torch
import torch.distributed as dist

from ddp_from_scratch.common.arguments import check_ignore, check_src
from ddp_from_scratch.common.group import gather_objects, on_gpu_of
from ddp_from_scratch.common.memory import sparse_parameters
from ddp_from_scratch.core.layout import assign
from ddp_from_scratch.sync.check_sync import gather_integers

# Approximate. Small enough that a rank forwards one message while it receives the next.
MESSAGE_BYTES = 16 * 2**20

# What some tensors are, and what to do.
_LAZY = (
    "is lazy and has no shape yet: run one forward pass on every rank before broadcast_parameters"
)
_EXPANDED = "is expanded: several of its elements share memory: clone() it on every rank"
_META = "is on the meta device and has no values: materialise it on every rank"
_NOT_DENSE = "is sparse or quantised and cannot be sent: make it dense, or name it in ignore"
_UNSENDABLE = (_LAZY, _EXPANDED, _META, _NOT_DENSE)

# Where a program may have changed buffers after it has made the Reducer.
_SAME_BUFFERS = (
    "give every rank buffers of the same names, shapes and dtypes; one that is a rank's own is "
    "left out with ignore=[name]"
)


def broadcast_parameters(
    module: torch.nn.Module,
    src: int = 0,
    process_group: dist.ProcessGroup | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Gives every rank the parameters and buffers of rank `src`, bit for bit. Collective.

    All ranks first compare their models. Then they pass the tensors along a binomial tree rooted at
    `src`, with `send` and `recv`, in flat messages.

    Args:
        module: the model; its tensors keep their storage, shape, strides and device.
        src: the rank, within the group, to copy from.
        process_group: the ranks that take part; None means all.
        ignore: names of parameters and buffers that are neither compared nor copied.

    Raises:
        ValueError: `src` is not a rank of the group, or the module has parameters or buffers that
            are lazy, expanded, sparse, quantised or on the meta device.
        TypeError: `src` is no whole number, or `ignore` is a text instead of a list of them.
        RuntimeError: the parameters or buffers differ in number, names, order, shapes, strides,
            dtypes, requires_grad or sparseness of gradients. The text names the first difference
            and the two ranks, and is the same on every rank.
    """
    check_src(src, process_group)
    ignore = check_ignore(ignore, module)
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

    Call it before an evaluation or a checkpoint, unless the Reducer has `sync_buffers=True`. The
    arguments are those of `broadcast_parameters`. All ranks first compare their buffers.

    Raises:
        ValueError: `src` is not a rank of the group, or a buffer is expanded, lazy, sparse,
            quantised or on the meta device.
        TypeError: as `broadcast_parameters`.
        RuntimeError: the ranks' buffers differ in number, names, order, shapes or dtypes. The text
            names the first difference and the two ranks, and is the same on every rank.
    """
    check_src(src, process_group)
    ignore = check_ignore(ignore, module)
    buffers = {name: b for name, b in module.named_buffers() if name not in ignore}
    lines = describe_buffers(buffers)
    with on_gpu_of(module):
        if (difference := buffer_difference(lines, process_group)) is not None:
            raise RuntimeError(difference)
    _check_sendable(lines)
    send_tensors([*buffers.values()], src, process_group)


def _check_same_model(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None, ignore: Collection[str]
) -> None:
    mine = _describe(module, ignore)
    with on_gpu_of(module):
        difference = first_difference({"parameters and buffers": mine}, process_group)
    if difference is not None:
        raise RuntimeError(f"the models differ: {difference[1]}")
    # Not earlier: a rank that raised before the exchange would leave the others waiting.
    _check_sendable(mine)


def check_same_parameters(
    parameters: Mapping[str, torch.Tensor],
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
    options: Sequence[str],
) -> None:
    """Raises as `broadcast_parameters` if these parameters of a module differ. Collective.

    Also if the lines of the ranks' options differ.
    """
    mine = {"options": options, "parameters": _describe_parameters(parameters, module)}
    with on_gpu_of(module):
        difference = first_difference(mine, process_group)
    if difference is not None:
        what = {"options": "Reducers' options", "parameters": "models"}[difference[0]]
        raise RuntimeError(f"the {what} differ: {difference[1]}")


def first_difference(
    mine: Mapping[str, Sequence[str]], process_group: dist.ProcessGroup | None
) -> tuple[str, str] | None:
    """Returns the first of these kinds of lines in which ranks differ, and how. Collective.

    All ranks give the same kinds, and get the same text.
    """
    digest = hashlib.sha256(repr([*map(list, mine.values())]).encode()).digest()
    # Equal ranks exchange 32 bytes each. The lines are sent only to name a difference.
    words = [int.from_bytes(digest[at : at + 8], signed=True) for at in range(0, 32, 8)]
    digests = gather_integers(words, process_group)
    rank = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if rank is None:
        return None
    descriptions = gather_objects([*map(list, mine.values())], process_group)
    rows = zip(mine, descriptions[0], descriptions[rank], strict=True)
    what, zero, other = next(row for row in rows if row[1] != row[2])
    ours, theirs = next(pair for pair in zip_longest(zero, other) if pair[0] != pair[1])
    return what, (
        f"rank 0 has {ours or f'only {len(zero)} {what}'}; "
        f"rank {rank} has {theirs or f'only {len(other)} {what}'}"
    )


def buffer_difference(lines: Sequence[str], process_group: dist.ProcessGroup | None) -> str | None:
    """Compares `describe_buffers` of all ranks; returns an error's text, or None. Collective."""
    difference = first_difference({"buffers": lines}, process_group)
    return difference and f"the ranks' buffers differ: {difference[1]}: {_SAME_BUFFERS}"


def _describe(module: torch.nn.Module, ignore: Collection[str]) -> list[str]:
    parameters = {n: p for n, p in module.named_parameters() if n not in ignore}
    buffers = {n: b for n, b in module.named_buffers() if n not in ignore}
    return _describe_parameters(parameters, module) + describe_buffers(buffers)


def _describe_parameters(
    parameters: Mapping[str, torch.Tensor], module: torch.nn.Module
) -> list[str]:
    sparse = sparse_parameters(module)

    def line(name: str, tensor: torch.Tensor) -> str:
        if (reason := _unsendable(tensor)) is not None:
            return f"parameter {name} {reason}"
        end = ", sparse gradient" if id(tensor) in sparse else ""
        trains = f"requires_grad={tensor.requires_grad}"
        shape = f"parameter {name}: shape {tuple(tensor.shape)}"
        return f"{shape}, strides {tensor.stride()}, {tensor.dtype}, {trains}{end}"

    return [line(name, parameter) for name, parameter in parameters.items()]


def describe_buffers(buffers: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns what ranks must have in common of each buffer, or the reason why it is not sent."""
    return [
        f"buffer {name} {reason}"
        if (reason := _unsendable(buffer)) is not None
        else f"buffer {name}: shape {tuple(buffer.shape)}, {buffer.dtype}"
        for name, buffer in buffers.items()
    ]


def check_buffers(module: torch.nn.Module, ignore: Collection[str]) -> None:
    """Raises a ValueError for a buffer that cannot be sent. Communicates nothing."""
    _check_sendable(describe_buffers({n: b for n, b in module.named_buffers() if n not in ignore}))


def unsendable(lines: Iterable[str]) -> str | None:
    """Returns the first line of a tensor that cannot be sent."""
    return next((line for line in lines if line.endswith(_UNSENDABLE)), None)


def _check_sendable(lines: Iterable[str]) -> None:
    if (line := unsendable(lines)) is not None:
        raise ValueError(line)


def _unsendable(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return _LAZY
    if tensor.layout != torch.strided or tensor.is_quantized:
        return _NOT_DENSE
    if tensor.is_meta:
        return _META
    rows = zip(tensor.shape, tensor.stride(), strict=True)
    expanded = any(size > 1 and stride == 0 for size, stride in rows)
    return _EXPANDED if expanded else None


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
        packing = Packing(members)
        wire = packing.pack(members, members[0].device)
        # Receive, then send: in a tree no two ranks wait for each other.
        for way, peers in ((dist.irecv, parent), (dist.isend, children)):
            # In a batch, since nccl would otherwise open a communicator for each pair of ranks.
            steps = [dist.P2POp(way, wire, group=process_group, group_peer=peer) for peer in peers]
            for work in dist.batch_isend_irecv(steps) if steps else []:
                work.wait()
        if rank != src:
            write(members, packing.unpack(wire))


def messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups tensors into messages of one device, of about `MESSAGE_BYTES`."""
    sizes = [(t.nbytes, t.device) for t in tensors]
    for members in assign(sizes, range(len(tensors)), [MESSAGE_BYTES]):
        if any(tensors[index].numel() for index in members):
            yield [tensors[index] for index in members]


class Packing:
    """Places tensors of one device in a message of bytes, which every backend can send.

        | header | elements of 16 bytes | of 8 | of 4 | of 2 | of 1 |

    The largest elements come first, so that all are aligned.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], header: int = 0) -> None:
        order = sorted(range(len(tensors)), key=lambda index: _by_size(tensors[index]))
        self._parts: list[tuple[list[int], torch.dtype, slice, list[torch.Size]]] = []
        self.nbytes: int = header  # of the message
        for dtype, found in groupby(order, key=lambda index: tensors[index].dtype):
            members = [*found]
            begin, self.nbytes = self.nbytes, self.nbytes + sum(tensors[i].nbytes for i in members)
            shapes = [tensors[index].shape for index in members]
            self._parts.append((members, dtype, slice(begin, self.nbytes), shapes))

    def pack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Returns a message with the tensors' values, and a header of zeros."""
        wire = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        for members, dtype, place, _ in self._parts:
            flat = [tensors[index].detach().reshape(-1) for index in members]
            torch.cat(flat, out=wire[place].view(dtype))
        return wire

    def unpack(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a message, in the order of the tensors that it holds."""
        found: dict[int, torch.Tensor] = {}
        for members, dtype, place, shapes in self._parts:
            parts = wire[place].view(dtype).split([*map(torch.Size.numel, shapes)])
            found |= zip(members, map(torch.Tensor.view, parts, shapes), strict=True)
        return [found[index] for index in range(len(found))]


def _by_size(tensor: torch.Tensor) -> tuple[int, str]:
    return -tensor.element_size(), str(tensor.dtype)


@torch.no_grad()
def write(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copies values into tensors of the same shapes."""
    pairs = [*zip(tensors, values, strict=True)]
    # `_foreach_copy_` takes no lazily conjugated tensor.
    at_once = [not (t.is_inference() or t.is_conj() or t.is_neg()) for t in tensors]
    if any(at_once):
        torch._foreach_copy_([*compress(tensors, at_once)], [*compress(values, at_once)])
    for (tensor, value), done in zip(pairs, at_once, strict=True):
        if not done:
            # A tensor that was made in inference mode can be written only there.
            with torch.inference_mode(tensor.is_inference()):
                tensor.copy_(value)
