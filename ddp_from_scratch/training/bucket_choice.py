"""Buckets that `--bucket-cap-mb auto` has chosen: kept in checkpoints, printed at the end."""

from typing import Any

from ddp_from_scratch.core.layout import AUTO
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.training.checkpoint import State
from ddp_from_scratch.training.settings import Settings


def chosen(reducer: Reducer) -> dict[str, Any] | None:
    """The choice, for a checkpoint; None where it is not settled yet."""
    if reducer.bucket_cap_mb is None:
        return None
    return {"bucket_cap_mb": reducer.bucket_cap_mb, "overlap": reducer.overlap}


def to_begin_with(settings: Settings, state: State | None, world_size: int) -> dict[str, Any]:
    """`bucket_cap_mb` and `overlap` of the Reducer: as asked for, or as "auto" chose before."""
    if settings.bucket_cap_mb == AUTO and state is not None:
        # None where the run was stopped before it had found them: they are looked for again.
        before: dict[str, Any] | None = state.get("buckets")
        # With other settings or another number of ranks other buckets may be the best.
        same = state["world_size"] == world_size and not settings.changes_since(state["settings"])
        if same and before is not None:
            return before
    return {"bucket_cap_mb": settings.bucket_cap_mb, "overlap": settings.overlap}


def summary(settings: Settings, reducer: Reducer) -> str | None:
    """One line on the choice of "auto"; None without it."""
    if settings.bucket_cap_mb != AUTO:
        return None
    cap = reducer.bucket_cap_mb
    if cap is None:
        return f"bucket_cap_mb auto: not settled in {reducer.iteration} averages"
    caps = cap if isinstance(cap, list | tuple) else (cap,)
    sizes = ", then ".join(f"{size:g}" for size in caps)
    return (
        f"bucket_cap_mb auto: {sizes} MiB, sent {'during' if reducer.overlap else 'after'} backward"
    )
