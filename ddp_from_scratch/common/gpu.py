"""Streams, events and the random generator of a GPU. Only this module calls torch.cuda."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch


def is_gpu(device: torch.device) -> bool:
    """True for a device with streams, which executes asynchronously to the host."""
    return device.type == "cuda"


def is_capturing() -> bool:
    """True while the current stream records a CUDA graph, whose events have no times."""
    return torch.cuda.is_current_stream_capturing()


def record(device: torch.device, timed: bool = False) -> torch.Event:
    """Records an event on the device's current stream."""
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


class HostCopy:
    """A copy of a tensor on the host, made when the current stream comes to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_gpu = is_gpu(tensor.device)
        self._values = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu
        )
        self._values.copy_(tensor, non_blocking=True)
        self._made = record(tensor.device) if on_gpu else None

    def wait(self) -> torch.Tensor:
        """Waits for the copy, and returns it."""
        if self._made is not None:
            self._made.synchronize()
        return self._values


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device the current one in a `with` block. A no-op for a CPU."""
    if not is_gpu(device) or device.index is None:
        return nullcontext()
    return torch.accelerator.device_index(device.index)


@contextmanager
def aside(device: torch.device) -> Iterator[torch.Stream]:
    """Makes a second stream the current one; it first waits for the stream current before."""
    stream = _beside(device)
    before = torch.accelerator.current_stream(device)
    stream.wait_stream(before)
    torch.accelerator.set_stream(stream)  # not `with stream`, which fails in two threads at a time
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(before)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the allocator from reusing the tensors' memory before the current stream is done."""
    for tensor in tensors:
        if is_gpu(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


@cache
def _beside(device: torch.device) -> torch.Stream:
    # One per GPU, since the allocator reuses the memory of a stream on that stream alone.
    return torch.Stream(device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work. A no-op for a CPU."""
    if is_gpu(device):
        torch.accelerator.synchronize(device)


def count() -> int:
    """Returns the number of GPUs that this process sees. Does not initialise CUDA."""
    return torch.cuda.device_count()


def is_in_bad_fork() -> bool:
    """True in a fork of a process that has called CUDA, even just to count GPUs."""
    return torch.cuda._is_in_bad_fork()


def generator_state() -> torch.Tensor | None:
    """Returns the state of the current GPU's generator; None if no GPU is in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_generator_state(state: torch.Tensor) -> None:
    """Sets the state of the current GPU's generator to `state`, a CPU tensor."""
    torch.cuda.set_rng_state(state)


def product_name() -> str | None:
    """Returns the name of the current GPU's model; None without a GPU."""
    return torch.cuda.get_device_name() if count() else None


def unique_name(device: torch.device) -> str:
    """Returns a name that no other GPU has."""
    return str(torch.cuda.get_device_properties(device).uuid)
