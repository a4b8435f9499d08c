"""8-bit integers with a scale for each block: what `int8_blockwise` sends between machines.

    a part of a bucket   | block of 256 | block of 256 | 44 |
    its message          | a scale for each block: float32 | biases: float32 | elements: int8 |

A block's scale is its largest absolute value / 127, and its elements are integers times the scale.
Each machine owns a part of the elements. Every machine sends each owner its sum over its own ranks
(all-to-all). The owner adds them to its own in float32 and sends the average to all (all-gather).

Both messages are rounded, and both have error feedback: the owner of a part keeps what rounding has
changed, and adds it to the next sum.

Follows: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass
Error-Compensated Compression" (ICML 2019). Its owners add the second error to the next average. It
is here part of the first error, so it is in the owner's next message: the sum of all averages and
errors is the same. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022) have
a scale for each block, so that a large value makes only its neighbours coarse.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.reduction import CHUNK, share_of
from ddp_from_scratch.backend.transport import Transport
from ddp_from_scratch.core.bucket import FlatBucket

BLOCK = 256
# Up to this scale, whose inverse may be infinite, a block is sent as zeros.
_LEAST = torch.finfo(torch.float32).tiny

Exchange = tuple[list[torch.Tensor], list[torch.Tensor]]  # sent and received, by rank


class Message:
    """A flat float32 tensor on its way to other machines.

    Args:
        numel: the number of its elements.
        exact: indices of the elements that are sent in float32.

    Attributes:
        payload: all of it, as bytes. `floats`, `scales`, `in_full` and `integers` are parts of it.
        floats: the scales, and the elements in float32.
    """

    def __init__(self, numel: int, exact: torch.Tensor) -> None:
        blocks = -(-numel // BLOCK)
        self.numel: int = numel
        begin = 4 * (blocks + exact.numel())
        self.payload: torch.Tensor = torch.empty(begin + numel, dtype=torch.uint8, device="cpu")
        self.floats: torch.Tensor = self.payload[:begin].view(torch.float32)
        self.scales, self.in_full = self.floats.split([blocks, exact.numel()])
        self.integers: torch.Tensor = self.payload[begin:].view(torch.int8)
        self.exact: torch.Tensor = exact

    def pack(self, values: torch.Tensor) -> None:
        """Fills the message. What rounding loses stays in `values`.

        If a value is not finite, so are all of its block once they are unpacked.
        """
        torch.index_select(values, 0, self.exact, out=self.in_full)
        values.index_fill_(0, self.exact, 0.0)
        for elements, blocks, width in _pieces(values.numel()):
            rows, scale = values[elements].view(-1, width), self.scales[blocks].view(-1, 1)
            torch.amax(rows.abs(), dim=1, keepdim=True, out=scale)
            scale.div_(127)
            scale.masked_fill_(scale <= _LEAST, 0.0)
            integers = rows.mul(scale.reciprocal().masked_fill_(scale == 0, 0.0)).round_()
            self.integers[elements].view(-1, width).copy_(integers)
            rows.sub_(integers.mul_(scale))

    def is_finite(self) -> bool:
        return bool(self.floats.isfinite().all())

    def unpack(self, into: torch.Tensor) -> None:
        """Replaces `into` by the message."""
        for elements, blocks, width in _pieces(into.numel()):
            rows = into[elements].view(-1, width)
            rows.copy_(self.integers[elements].view(-1, width))
            rows.mul_(self.scales[blocks].view(-1, 1))
        into.index_copy_(0, self.exact, self.in_full)

    def add_to(self, total: torch.Tensor) -> None:
        """Adds the message to a tensor of its size."""
        for elements, blocks, width in _pieces(total.numel()):
            integers = self.integers[elements].view(-1, width).float()
            rows = total[elements].view(-1, width)
            rows.addcmul_(integers, self.scales[blocks].view(-1, 1))
        total.index_add_(0, self.exact, self.in_full)


def _pieces(numel: int) -> Iterator[tuple[slice, slice, int]]:
    """Yields places of elements, those of their blocks, and the elements in each block."""
    whole = numel // BLOCK
    for begin in range(0, whole, CHUNK // BLOCK):
        end = min(begin + CHUNK // BLOCK, whole)
        yield slice(BLOCK * begin, BLOCK * end), slice(begin, end), BLOCK
    if numel % BLOCK:
        yield slice(BLOCK * whole, numel), slice(whole, whole + 1), numel % BLOCK


@dataclass(frozen=True)
class Blockwise:
    """Sums a bucket over machines in 8 bits, as a `Crossing`.

    Attributes:
        exact: indices of the bucket's elements that are sent in float32, in order.
        errors: by first element, those of the parts that this rank sends; kept for the next step.
        factor: of the sum.
    """

    exact: torch.Tensor
    errors: dict[int, torch.Tensor]
    factor: float

    def __call__(self, transport: Transport, part: torch.Tensor, begin: int) -> None:
        for sent, received in self.exchanges(part, begin, transport.rank, transport.size):
            transport.exchange(sent, received)

    def exchanges(
        self, part: torch.Tensor, begin: int, rank: int, size: int
    ) -> Generator[Exchange, None, None]:
        """Replaces the part by the same bits on each rank, its sum times `factor`.

        Yields what the ranks must exchange before the next call; nothing with themselves. Errors
        are added before, and kept after, unless the sum is not finite: then they stay.
        """
        error = self._error(begin, part)
        part.add_(error)
        shares, exact = [], []
        for first, last in (share_of(part.numel(), owner, size) for owner in range(size)):
            shares.append(part[first:last])
            exact.append(self._exact_in(begin + first, begin + last))
        sent, averages = (list(map(_message, shares, exact)) for _ in range(2))
        received = [_message(shares[rank], exact[rank]) for _ in shares]
        total = shares[rank]
        sent[rank] = received[rank] = _message(total[:0], exact[rank][:0])  # it is not rounded
        # All-to-all: to each owner its share of this rank's part.
        for message, share in zip(sent, shares, strict=True):
            message.pack(share[: message.numel])
        yield _payloads(sent), _payloads(received)
        for message in received:
            message.add_to(total[: message.numel])
        averages[rank].pack(total)  # what rounding loses stays, as the error of the next step
        # A division: see `core/comm_hooks.py`.
        averages[rank].floats.mul_(self.factor)
        # All-gather: every rank unpacks the same bytes.
        yield [averages[rank].payload] * size, _payloads(averages)
        if all(message.is_finite() for message in averages):
            error.copy_(part)
        for message, share in zip(averages, shares, strict=True):
            message.unpack(share)

    def _error(self, begin: int, part: torch.Tensor) -> torch.Tensor:
        known = self.errors.get(begin)
        if known is None or known.numel() != part.numel():
            known = self.errors[begin] = torch.zeros_like(part)
        return known

    def _exact_in(self, begin: int, end: int) -> torch.Tensor:
        ends = torch.tensor([begin, end], dtype=torch.int64, device="cpu")
        first, last = torch.searchsorted(self.exact, ends).tolist()
        return self.exact[first:last] - begin


def _message(share: torch.Tensor, exact: torch.Tensor) -> Message:
    return Message(share.numel(), exact)


def _payloads(messages: Sequence[Message]) -> list[torch.Tensor]:
    return [message.payload for message in messages]


Members = tuple[int, ...]  # the ids of a bucket's parameters, in order


@dataclass
class Int8State:
    """The errors that this rank keeps from step to step for `int8_blockwise`; one for each Reducer.

    A rank keeps the errors of those parts of the buckets that it sends. They are float32; together
    a machine's ranks keep as many as the machine has gradients. If the buckets' layout or the
    ranks of a machine change, errors begin with zeros again.

    Attributes:
        process_group: the ranks that take part; None means those of the Reducer.
    """

    process_group: dist.ProcessGroup | None = None
    _errors: dict[Members, dict[int, torch.Tensor]] = field(default_factory=dict)
    _exact: dict[Members, torch.Tensor] = field(default_factory=dict)

    def crossing(self, bucket: FlatBucket, factor: float) -> Blockwise | None:
        """Returns what sums this bucket over machines; None if all of it is sent in float32."""
        members = tuple(map(id, bucket.parameters()))
        if members not in self._exact:  # the first average, or the layout has changed
            for known in (self._errors, self._exact):
                for other in [*known]:
                    if other != members and not set(other).isdisjoint(members):
                        del known[other]
            self._exact[members] = _exact_elements(bucket)
        exact = self._exact[members]
        if exact.numel() == bucket.flat.numel():
            return None
        return Blockwise(exact, self._errors.setdefault(members, {}), factor)

    def rescale(self, factor: float) -> None:
        """Multiplies the errors by the factor by which the loss scale has changed."""
        for of_bucket in self._errors.values():
            for error in of_bucket.values():
                error.mul_(factor)

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Returns this rank's errors for a checkpoint, by first element and parameters' names."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {
            "errors": {
                (begin, *(names[member] for member in members)): error
                for members, of_bucket in self._errors.items()
                for begin, error in of_bucket.items()
            }
        }

    def load_state_dict(self, module: torch.nn.Module, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict` of the same rank.

        If the buckets and the ranks of each machine are the same, the averages have the same bits.
        Otherwise errors begin with zeros. A ValueError if the module lacks a parameter.
        """
        ids = {name: id(parameter) for name, parameter in module.named_parameters()}
        self._errors, self._exact = {}, {}
        for (begin, *names), error in state["errors"].items():
            if missing := [name for name in names if name not in ids]:
                raise ValueError(f"the state has an error of {missing[0]}, the module no such name")
            members = tuple(ids[name] for name in names)
            self._errors.setdefault(members, {})[begin] = error.clone()


def _exact_elements(bucket: FlatBucket) -> torch.Tensor:
    """Returns the indices of the elements of parameters that are no matrices."""
    rows = zip(bucket.offsets, bucket.parameters(), strict=True)
    ranges = [
        torch.arange(o, o + p.numel(), dtype=torch.int64, device="cpu")
        for o, p in rows
        if p.dim() < 2
    ]
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *ranges])
