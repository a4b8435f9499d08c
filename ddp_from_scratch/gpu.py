"""All that this package asks of a GPU beside torch.distributed: its streams, events and generator.

torch.accelerator where that has what is needed, torch.cuda for the rest.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch


def is_gpu(device: torch.device) -> bool:
    """True for a device with streams, which the host runs ahead of."""
    return device.type == "cuda"


def is_capturing() -> bool:
    """True while the current stream records a CUDA graph, whose events have no times."""
    return torch.cuda.is_current_stream_capturing()


def record(device: torch.device, timed: bool = False) -> torch.Event:
    """Returns an event behind all that the device's current stream has been given."""
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device the current one inside. A no-op for a CPU."""
    if not is_gpu(device) or device.index is None:
        return nullcontext()
    return torch.accelerator.device_index(device.index)


@contextmanager
def aside(device: torch.device) -> Iterator[torch.Stream]:
    """Runs what is inside on a stream of its own, behind what the current one has been given."""
    stream = _beside(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with on(stream):
        yield stream


@contextmanager
def on(stream: torch.Stream | None) -> Iterator[None]:
    """Makes a stream the current one inside; None leaves it."""
    if stream is None:
        yield
        return
    # A torch.Stream is a context, too, but not in two threads at a time.
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors, once freed, until the current stream has used them."""
    for tensor in tensors:
        if is_gpu(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def current_stream(device: torch.device) -> torch.Stream | None:
    """The current stream of the device; None for a CPU."""
    return torch.accelerator.current_stream(device) if is_gpu(device) else None


@cache
def _beside(device: torch.device) -> torch.Stream:
    # One for each GPU: memory that was made on it is used again only here, behind the current
    # stream, so what that still reads is not written.
    return torch.Stream(device)


def count() -> int:
    """The number of GPUs that this process sees. Does not initialise CUDA."""
    return torch.cuda.device_count()


def generator_state() -> torch.Tensor | None:
    """The state of the current GPU's generator; None if no GPU is in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_generator_state(state: torch.Tensor) -> None:
    """Puts the current GPU's generator into a state, a CPU tensor."""
    torch.cuda.set_rng_state(state)


def unique_name(device: torch.device) -> str:
    """A name that no other GPU has."""
    return str(torch.cuda.get_device_properties(device).uuid)
