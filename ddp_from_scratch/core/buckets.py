"""Makes a Reducer's buckets, one behind the other in one flat memory."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.layout import assign
from ddp_from_scratch.errors import shortened
from ddp_from_scratch.memory import dense_strides, zeros

# Elements. Buckets begin at multiples of it: cache lines, aligned for every CPU's vector units.
ALIGNMENT = 64


class Layout:
    """The parameters of a Reducer, and the memory of their buckets.

    `apart` holds, by name, functions that make a separate bucket for a parameter. The ranks of
    `memory_of`, if given, may share the memory: construction is collective if its backend offers
    that. `owner` is the Reducer's name in errors about buckets.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        apart: Mapping[str, Callable[..., Bucket]],
        memory_of: dist.ProcessGroup | None,
        owner: str,
    ) -> None:
        self._apart, self._owner = apart, owner
        # Parameters in buckets of their own come last: indices below `_in_flat` are in flat ones.
        self.names = sorted(parameters, key=lambda name: name in apart)
        self.parameters = [parameters[name] for name in self.names]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self._in_flat = len(self.names) - len(apart)
        flat = self.parameters[: self._in_flat]
        self._gradients = [(p.numel() * p.element_size(), (p.dtype, p.device)) for p in flat]
        # Fixed now, while the strides are the same on all ranks. A rank may transpose a parameter
        # later, and its bucket must still match the others'.
        self._strides = [dense_strides(parameter) for parameter in flat]
        sizes = dict.fromkeys((key for _, key in self._gradients), 0)
        for parameter, (_, key) in zip(flat, self._gradients, strict=True):
            # ALIGNMENT more for each, because every gradient may be a bucket of its own.
            sizes[key] += parameter.numel() + ALIGNMENT
        # Allocated once for any layout, since allocating shared memory is collective.
        self._memory = {key: zeros(size, *key, memory_of) for key, size in sizes.items()}

    def plan(self, order: Sequence[str], caps: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the members of each bucket; those apart come last."""
        indices = [*map(self.index_of.__getitem__, order)]
        apart = zip(filter(self._in_flat.__le__, indices), strict=True)
        return [*assign(self._gradients, filter(self._in_flat.__gt__, indices), caps), *apart]

    def make(
        self,
        order: Sequence[str],
        caps: Sequence[int],
        kind: type[Bucket],
        process_group: dist.ProcessGroup | None,
    ) -> tuple[list[Bucket], list[Bucket]]:
        """Makes flat buckets of this kind, one behind the other in memory, and those apart."""
        plan = self.plan(order, caps)
        flat = [members for members in plan if members[0] < self._in_flat]
        ends, buckets = dict.fromkeys(self._memory, 0), list[Bucket]()
        for index, members in enumerate(flat):
            parameters = [self.parameters[member] for member in members]
            _, key = self._gradients[members[0]]
            numel = sum(parameter.numel() for parameter in parameters)
            buffer = self._memory[key][ends[key] : ends[key] + numel]
            ends[key] += -(-numel // ALIGNMENT) * ALIGNMENT
            strides = [self._strides[member] for member in members]
            name, is_last = f"bucket {index} of {self._owner}", index == len(flat) - 1
            label = f"ddp.bucket {index} ({shortened([self.names[m] for m in members], 3)})"
            buckets.append(kind(members, parameters, buffer, strides, index, is_last, name, label))
        apart = []
        for index, (member,) in enumerate(plan[len(flat) :], len(flat)):
            name, parameter = self.names[member], self.parameters[member]
            apart.append(self._apart[name](member, parameter, index, process_group, name))
        return buckets, apart
