"""The Reducer in an argument that may also be a wrapper."""

from typing import Any

from ddp_from_scratch.core.reducer import CoreReducer


def reducer_of(given: Any) -> Any:
    """Returns a Reducer, or that of a `DistributedDataParallel`; a TypeError for anything else."""
    for one in (given, getattr(given, "reducer", None)):
        if isinstance(getattr(one, "core", None), CoreReducer):
            return one
    raise TypeError(
        f"reducer must be a ddp.Reducer or a ddp.DistributedDataParallel, got a "
        f"{type(given).__module__}.{type(given).__qualname__}"
    )
