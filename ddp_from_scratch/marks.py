"""Moments of this rank, taken while a step runs and read in seconds afterwards."""

import time
from typing import Any, Protocol

import torch


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


class CudaMarks:
    """Marks of what a GPU does: events in the stream that is current where they are taken.

    The host runs ahead of the GPU, so its own clock would show when work was issued, and not when
    it ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One moment on both clocks.
        torch.cuda.synchronize(device)
        self._first, self._began = self.take(), time.perf_counter()
        self._first.synchronize()

    def take(self) -> torch.cuda.Event:
        """Records an event on the GPU's current stream, in whatever thread."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Waits for the event and returns its time."""
        mark.synchronize()
        return self._began + float(self._first.elapsed_time(mark)) / 1e3


def marks_for(device: torch.device) -> Marks:
    """Returns the marks of the device that computes."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()
