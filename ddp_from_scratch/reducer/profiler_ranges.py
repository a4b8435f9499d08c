"""Named ranges of buckets in torch.profiler."""

from collections.abc import Mapping
from functools import partial

import torch
from torch.profiler import record_function

from ddp_from_scratch.buckets.gradient_bucket import GradientBucket
from ddp_from_scratch.buckets.observer import Observer


class ProfilerRanges(Observer):
    """Opens a range of torch.profiler for each phase of each bucket, with its parameters' names.

    `ddp.bucket 3: pack, launch`, `ddp.bucket 3: wait` and `ddp.bucket 3: unpack` are of the thread
    that runs backward. `ddp.bucket 3: on its way` is asynchronous, from the launch to the average.

    Args:
        name_of: the name of each parameter, by its id.
    """

    def __init__(self, name_of: Mapping[int, str]) -> None:
        self._name_of = name_of
        self._open: record_function | None = None

    def on_launch(self, bucket: GradientBucket) -> None:
        """Opens the range of packing."""
        self._enter(bucket, "pack, launch")

    def on_launched(self, bucket: GradientBucket) -> None:
        """Opens the asynchronous range, which the average closes."""
        self._exit()
        way = self._range(bucket, "on its way")
        way.__enter__()
        bucket.when_landed(partial(way.__exit__, None, None, None))

    def on_wait(self, bucket: GradientBucket) -> None:
        """Opens the range of waiting."""
        self._enter(bucket, "wait")

    def on_waited(self, bucket: GradientBucket) -> None:
        """Opens the range of unpacking."""
        self._enter(bucket, "unpack")

    def on_finished(self, iteration: int, bucket: GradientBucket, takes_part: bool) -> None:
        """Closes the range of unpacking."""
        self._exit()

    def _range(self, bucket: GradientBucket, phase: str) -> record_function:
        names = ", ".join(self._name_of[id(parameter)] for parameter in bucket.parameters())
        return record_function(f"ddp.bucket {bucket.index()}: {phase}", names)

    def _enter(self, bucket: GradientBucket, phase: str) -> None:
        self._exit()
        self._open = self._range(bucket, phase).__enter__()

    def _exit(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def profiling() -> bool:
    """True while torch.profiler, or torch.autograd.profiler, records."""
    return torch.autograd.profiler._is_profiler_enabled
