"""The Reducers of this process, in the order in which they launch their buckets in one pass.

All ranks must issue the same collectives in the same order. Within a Reducer that is the order of
the buckets' index. Among several Reducers the one made last is first: forward passes mostly run
through modules in the order in which they were made, and backward the other way.
"""

import itertools
import weakref
from typing import Any

import torch.distributed as dist

from ddp_from_scratch.node.shared_memory_group import SharedMemoryGroup

Reducer = Any  # reducer.py imports this module

# In the order in which they were made, which is the same on all ranks of a group. No list that weak
# references take themselves out of: up to Python 3.11 the garbage collector may run while a list is
# copied, and a copy of one that has become shorter holds what is no longer there.
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_count = itertools.count()
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
    _made[next(_count)] = reducer


def remove(reducer: Reducer) -> None:
    """Takes a Reducer out. Idempotent."""
    for number in [number for number, found in _made.items() if found is reducer]:
        del _made[number]


def is_alone() -> bool:
    """True if no other Reducer can have a part in a pass."""
    return len(_made) < 2


def living() -> list[Reducer]:
    """All Reducers that are in use, the first to launch first."""
    return [*_made.values()][::-1]


def ahead_of(reducer: Reducer) -> list[Reducer]:
    """The Reducers before this one that average in the backward pass under way."""
    # The graph decides, not which Reducers have begun: backward is not equally far on all ranks.
    everyone = living()
    before = everyone[: everyone.index(reducer)] if reducer in everyone else []
    return [other for other in before if other.takes_part()]
