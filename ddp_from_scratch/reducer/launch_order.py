"""The Reducers of this process, in the order in which they launch their buckets in one pass.

All ranks must issue the same collectives in the same order. Within a Reducer that is the order of
the buckets' index. Among several Reducers the one made last is first: forward passes mostly run
through modules in the order in which they were made, and backward the other way.
"""

import weakref
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup

Reducer = Any  # reducer.py imports this module

# In the order in which they were made, which is the same on all ranks of a group.
_made: list[weakref.ref[Any]] = []
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_name(memory_of: dist.ProcessGroup | None) -> str:
    """Returns the name of a new Reducer, the same on all ranks.

    Those are counted that all ranks of a group make together, to share memory: one rank may make
    another alone.
    """
    if not isinstance(memory_of, SharedMemoryGroup):
        return "a Reducer"
    return f"Reducer {_numbers.get(memory_of, 0) + 1}"


def add(reducer: Reducer, memory_of: dist.ProcessGroup | None) -> None:
    """Puts a new Reducer first, and counts it."""
    if memory_of is not None:
        _numbers[memory_of] = _numbers.get(memory_of, 0) + 1
    _made.append(weakref.ref(reducer, _made.remove))


def remove(reducer: Reducer) -> None:
    """Takes a Reducer out. Idempotent."""
    _made[:] = [found for found in _made if found() is not reducer]


def is_alone() -> bool:
    """True if no other Reducer can have a part in a pass."""
    return len(_made) < 2


def living() -> list[Reducer]:
    """All Reducers that are in use, the first to launch first."""
    return [reducer for found in reversed(tuple(_made)) if (reducer := found()) is not None]


def ahead_of(reducer: Reducer) -> list[Reducer]:
    """The Reducers before this one that average in the backward pass under way."""
    # The graph decides, not which Reducers have begun: backward is not equally far on all ranks.
    everyone = living()
    before = everyone[: everyone.index(reducer)] if reducer in everyone else []
    return [other for other in before if other.takes_part()]
