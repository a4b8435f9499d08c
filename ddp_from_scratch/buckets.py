"""All buckets of a model, in the order in which they are launched."""

from collections.abc import Mapping, Sequence
from typing import overload

import torch

from .bucket import Bucket, make_buckets


class Buckets(Sequence[Bucket]):
    """A sequence of buckets that knows its parameters by index and by name.

    Args:
        trainable: the parameters, by name.
        caps: as of `assign_buckets`.
        gradient_as_bucket_view: as of `Bucket`.

    Attributes:
        names, parameters: an index into these names a parameter everywhere.
        caps, gradient_as_bucket_view: as given.
    """

    def __init__(
        self,
        trainable: Mapping[str, torch.nn.Parameter],
        caps: Sequence[int],
        gradient_as_bucket_view: bool,
    ) -> None:
        self.names, self.parameters = list(trainable), list(trainable.values())
        self.caps, self.gradient_as_bucket_view = caps, gradient_as_bucket_view
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}

    @overload
    def __getitem__(self, index: int) -> Bucket: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bucket]: ...
    def __getitem__(self, index: int | slice) -> Bucket | list[Bucket]:
        return self._buckets[index]

    def __len__(self) -> int:
        return len(self._buckets)

    def lay_out(self, order: Sequence[str]) -> None:
        """Makes the buckets, or makes them anew, for gradients that are ready in this order."""
        index_of = {name: index for index, name in enumerate(self.names)}
        indices = [index_of[name] for name in order]
        self._buckets = make_buckets(
            self.parameters, indices, self.caps, self.gradient_as_bucket_view
        )
        self._bucket_of = {index: bucket for bucket in self for index in bucket.layout.members}

    def of(self, index: int) -> Bucket:
        """The bucket in which the gradient of parameter `index` lies."""
        return self._bucket_of[index]

    def members(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each."""
        return tuple(tuple(self.names[i] for i in bucket.layout.members) for bucket in self)

    def missing(self) -> list[str]:
        """The names of the parameters that have no gradient yet."""
        return [self.names[index] for bucket in self for index in sorted(bucket.missing)]

    def mark_rest_absent(self) -> None:
        """What has not been counted in yet gets no gradient in this pass."""
        for bucket in self:
            for index in tuple(bucket.missing):
                bucket.mark_absent(index)
