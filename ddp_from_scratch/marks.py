"""Moments of this rank, taken while a step runs and read in seconds afterwards."""

import time
from typing import Any, Protocol

import torch

from ddp_from_scratch import gpu


class Marks(Protocol):
    """Takes moments cheaply; their times are read after the steps."""

    def take(self) -> Any:
        """Returns a mark of this moment, for `seconds`."""

    def seconds(self, mark: Any) -> float:
        """Returns the time of a mark, in seconds of `time.perf_counter`."""


class HostMarks:
    """Marks of what the host does. Ranks of one Linux machine have one clock."""

    # The clock itself: a function around it would take as long again, for every gradient.
    take = staticmethod(time.perf_counter)

    def seconds(self, mark: float) -> float:
        """Returns the mark itself."""
        return mark


class GpuMarks:
    """Marks of what a GPU does: events in the stream that is current where they are taken.

    The host runs ahead of the GPU, so its own clock would show when work was issued, and not when
    it ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One moment on both clocks.
        gpu.synchronize(device)
        self._near, self._its_seconds = self.take(), time.perf_counter()
        self._near.synchronize()

    def take(self) -> torch.Event:
        """Records an event on the GPU's current stream, in whatever thread."""
        return gpu.record(self._device, timed=True)

    def seconds(self, mark: torch.Event) -> float:
        """Waits for the event and returns its time."""
        mark.synchronize()
        # A float32 in ms, which is exact to 0.1 us only between events that are near each other.
        passed = self._near.elapsed_time(mark) / 1e3
        seconds = self._its_seconds + passed
        if passed > 1:
            self._near, self._its_seconds = mark, seconds
        return seconds


def marks_for(device: torch.device) -> Marks:
    """Returns the marks of the device that computes."""
    return GpuMarks(device) if gpu.is_gpu(device) else HostMarks()
