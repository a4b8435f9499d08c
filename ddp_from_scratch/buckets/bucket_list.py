"""All buckets of a model, in the order of launch."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.gradient_bucket import GradientBucket
from ddp_from_scratch.buckets.layout import BucketLayout, Gradient, assign_buckets
from ddp_from_scratch.buckets.memory import ALIGNMENT, Memory, allocate, dense_strides
from ddp_from_scratch.buckets.sparse_bucket import SparseBucket, sparse_parameters


class BucketList:
    """The buckets of a model, in the order of launch.

    First come the flat buckets, then one for each sparse gradient. Comm hooks see only the flat
    ones.

    Args:
        module: the owner of the parameters; its layers declare sparse gradients.
        trainable: the parameters, by name.
        caps: see `assign_buckets`.
        gradient_as_bucket_view: see `Bucket`.
        memory_of: the group whose backend may offer the memory (`allocate`); None means none.
        owner: the name of the Reducer, for errors.

    Attributes:
        names, parameters: an index into these stands for a parameter everywhere.
        all: the buckets.
        flat: the buckets that are flat tensors.
        bucket_of: the bucket of each parameter, by index.
        caps, gradient_as_bucket_view: as given.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        trainable: Mapping[str, torch.nn.Parameter],
        process_group: dist.ProcessGroup | None,
        caps: Sequence[int],
        gradient_as_bucket_view: bool,
        memory_of: dist.ProcessGroup | None,
        owner: str,
    ) -> None:
        sparse = sparse_parameters(module)
        # Sparse gradients last: so the indices below `_in_flat` are those of flat buckets.
        self.names = sorted(trainable, key=lambda name: id(trainable[name]) in sparse)
        self.parameters = [trainable[name] for name in self.names]
        # Fixed now, while all ranks hold the same strides: one rank may transpose a parameter
        # later, and its bucket must still be laid out as on the others.
        self._strides = [dense_strides(parameter) for parameter in self.parameters]
        self._in_flat = sum(id(parameter) not in sparse for parameter in self.parameters)
        self._process_group, self._owner = process_group, owner
        self.caps, self.gradient_as_bucket_view = caps, gradient_as_bucket_view
        # Allocated once, whatever the layout: on mpi this is memory that ranks share, and
        # collective.
        self._memory = allocate(self.parameters[: self._in_flat], memory_of)
        # Tuples, replaced as a whole: the stall watch reads them in its own thread.
        self.all: tuple[GradientBucket, ...] = ()
        self.flat: tuple[Bucket, ...] = ()
        self.bucket_of: dict[int, GradientBucket] = {}
        # The names in the order of the present layout.
        self._order: Sequence[str] = ()

    def lay_out(self, order: Sequence[str], caps: Sequence[int] | None = None) -> None:
        """Replaces the buckets by new ones for gradients that become ready in this order.

        Idempotent: keeps the buckets if the new ones would be the same.

        Args:
            order: every name once.
            caps: the new caps; None keeps the old ones.
        """
        self.caps = caps or self.caps
        if self.planned(order, self.caps) == tuple(bucket.layout.members for bucket in self.all):
            return
        held = self._held() if self.gradient_as_bucket_view else {}
        self._order = order
        self._make()
        for bucket in self.flat:
            bucket.hold(held)

    def _held(self) -> dict[int, torch.Tensor]:
        """Copies each `.grad` that is a window: the new ones lie in the same memory."""
        held: dict[int, torch.Tensor] = {}
        # One tensor for all gradients: the C library keeps small blocks when they are freed.
        copies = {key: memory.clone() for key, memory in self._memory.items() if self.flat}
        for bucket in self.flat:
            buffer = bucket.buffer()
            begin = buffer.storage_offset()
            copy = copies[buffer.dtype, buffer.device][begin : begin + buffer.numel()]
            held |= bucket.held(copy)
        return held

    def keep_views(self) -> None:
        """Acts as `gradient_as_bucket_view=True` from now on. Idempotent."""
        if not self.gradient_as_bucket_view:
            self.gradient_as_bucket_view = True
            self._make()

    def _make(self) -> None:
        dense, sparse = self._indices(self._order)
        self.flat = make_buckets(
            self.parameters[: self._in_flat],
            dense,
            self.caps,
            self.gradient_as_bucket_view,
            self._memory,
            self._strides,
        )
        for bucket in self.flat:
            bucket.name = f"bucket {bucket.index()} of {self._owner}"
        rest = map(self._sparse_bucket, sparse, itertools.count(len(self.flat)))
        self.all = (*self.flat, *rest)
        self.bucket_of = {index: bucket for bucket in self.all for index in bucket.layout.members}

    def planned(self, order: Sequence[str], caps: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the members of the buckets that `lay_out` would make with these caps."""
        dense, sparse = self._indices(order)
        layouts = plan(self.parameters[: self._in_flat], dense, caps)
        return *(layout.members for layout in layouts), *((index,) for index in sparse)

    def _indices(self, order: Sequence[str]) -> tuple[list[int], list[int]]:
        """Splits names into indices of flat gradients and of sparse ones, each in this order."""
        index_of = {name: index for index, name in enumerate(self.names)}
        indices = [index_of[name] for name in order]
        return (
            [index for index in indices if index < self._in_flat],
            [index for index in indices if index >= self._in_flat],
        )

    def _sparse_bucket(self, member: int, index: int) -> SparseBucket:
        name, parameter = self.names[member], self.parameters[member]
        return SparseBucket(member, name, parameter, index, self._process_group)

    def members(self) -> tuple[tuple[str, ...], ...]:
        """Returns the names of each bucket's parameters."""
        return tuple(tuple(self.names[i] for i in bucket.layout.members) for bucket in self.all)

    def missing(self) -> list[str]:
        """Returns the names of the parameters that have no gradient yet."""
        return [self.names[index] for bucket in self.all for index in sorted(bucket.missing)]

    def restore_grads(self) -> None:
        """Moves gradients that were packed but not launched back to `.grad`."""
        for bucket in self.flat:
            # A later pass may add to them, or zero_grad() drop them.
            bucket.restore_grads()

    def reset(self) -> None:
        """Empties all buckets, whatever has become of their launches. Idempotent."""
        for bucket in self.all:
            bucket.reset()

    def mark_rest_unused(self) -> None:
        """Marks all parameters without a gradient in this pass as unused."""
        for bucket in self.all:
            for index in tuple(bucket.missing):
                bucket.mark_unused(index)


def plan(
    parameters: Sequence[torch.Tensor], order: Iterable[int], caps: Sequence[int]
) -> list[BucketLayout]:
    """Runs `assign_buckets` on the gradients of these parameters."""
    gradients = [
        Gradient(p.numel(), p.numel() * p.element_size(), (p.dtype, p.device)) for p in parameters
    ]
    return assign_buckets(gradients, order, caps)


def make_buckets(
    parameters: Sequence[torch.nn.Parameter],
    order: Iterable[int],
    caps: Sequence[int],
    gradient_as_bucket_view: bool,
    memory: Memory | None = None,
    strides: Sequence[tuple[int, ...]] | None = None,
) -> tuple[Bucket, ...]:
    """Makes the buckets of all parameters, in the order of launch; see `assign_buckets`.

    The buckets lie one behind the other in `memory`; without it each has memory of its own.
    """
    layouts = plan(parameters, order, caps)
    ends = dict.fromkeys(memory or (), 0)
    buckets = []
    for index, layout in enumerate(layouts):
        flat = None
        if memory is not None:
            key = (parameters[layout.members[0]].dtype, parameters[layout.members[0]].device)
            begin, ends[key] = ends[key], ends[key] + -(-layout.numel // ALIGNMENT) * ALIGNMENT
            flat = memory[key][begin : begin + layout.numel]
        members = [parameters[member] for member in layout.members]
        is_last = index == len(layouts) - 1
        laid = None if strides is None else [strides[member] for member in layout.members]
        buckets.append(Bucket(layout, members, gradient_as_bucket_view, index, is_last, flat, laid))
    return tuple(buckets)
