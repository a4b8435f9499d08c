"""Named ranges of buckets in torch.profiler."""

from collections.abc import Mapping

import torch
from torch.profiler import record_function

from ddp_from_scratch.buckets.gradient_bucket import BucketState, GradientBucket
from ddp_from_scratch.buckets.observer import Observer
from ddp_from_scratch.checks.gradient_checks import shortened


class ProfilerRanges(Observer):
    """Opens a range of torch.profiler for each phase of each bucket, with its parameters' names.

    `ddp.bucket 3 (fc.weight, fc.bias): pack`, then `launch`, `wait` and `unpack`, in the thread
    that runs backward. Its way between ranks is a range of the collective, such as
    `mpi:all_reduce`.

    Args:
        name_of: the name of each parameter, by its id.
    """

    def __init__(self, name_of: Mapping[int, str]) -> None:
        self._name_of = name_of
        # One at a time: a phase ends before the next begins, also where it raises.
        self._open: record_function | None = None
        # True while a wait is followed by unpacking: not where a hook has one bucket under way.
        self._unpacks = False

    def on_launch(self, bucket: GradientBucket) -> None:
        """Opens the range of packing."""
        self._unpacks = False
        self._enter(bucket, "pack")

    def on_packed(self, bucket: GradientBucket) -> None:
        """Ends it, and opens that of launching."""
        self._exit()
        self._enter(bucket, "launch")

    def on_launched(self, bucket: GradientBucket) -> None:
        """Ends the one that is open."""
        self._exit()

    def on_all_launched(self) -> None:
        """Expects that buckets are unpacked from now on."""
        self._unpacks = True

    def on_wait(self, bucket: GradientBucket) -> None:
        """Opens the range of waiting."""
        self._enter(bucket, "wait")

    def on_waited(self, bucket: GradientBucket) -> None:
        """Ends it, and opens that of unpacking."""
        self._exit()
        if self._unpacks and bucket.state is BucketState.LANDED:
            self._enter(bucket, "unpack")

    def on_finished(self, iteration: int, bucket: GradientBucket, takes_part: bool) -> None:
        """Ends it."""
        self._exit()

    def _enter(self, bucket: GradientBucket, phase: str) -> None:
        names = [self._name_of[id(parameter)] for parameter in bucket.parameters()]
        # In the name: torch does not show arguments that are given in Python.
        name = f"ddp.bucket {bucket.index()} ({shortened(names, 3)}): {phase}"
        self._open = record_function(name).__enter__()

    def _exit(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def profiling() -> bool:
    """True while torch.profiler, or torch.autograd.profiler, records."""
    return torch.autograd.profiler._is_profiler_enabled
