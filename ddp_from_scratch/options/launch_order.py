"""One launch order on all ranks: for layers that communicate, and for several Reducers.

All ranks must issue all collectives in one order, those of layers and those of buckets. So with
layers that communicate in backward (synchronised batch norm), every rank must launch its buckets at
the same points of backward, or all of them at its end. Among several Reducers in one backward pass
the newest launches first, because forward mostly runs modules in the order in which they were made.
"""

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.core.average import BackwardPass
from ddp_from_scratch.core.policies import LaunchOrder
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.options.unused import Unused, will_accumulate_any


def has_fixed_order(reducer: CoreReducer) -> bool:
    """True if every rank launches its buckets at the same points of backward."""
    # They differ if the comm hook starts several collectives, or if a bucket is full earlier on a
    # rank with unused parameters.
    return reducer.comm.concurrent and not reducer.allows_unused


def layers_with_groups(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers that have a process group of their own."""
    return [layer for layer in module.modules() if hasattr(layer, "process_group")]


def communicate(reducer: CoreReducer) -> bool:
    """True if layers of the Reducer's module communicate in its group."""
    found = reducer.observer(ReducerOrder)
    return found is not None and found.communicate()


def look_for_layers(reducer: CoreReducer) -> None:
    """Makes the Reducer look at the layers of its module that communicate, if there are any."""
    layers, found = layers_with_groups(reducer.module), reducer.observer(ReducerOrder)
    if layers and found is None:
        found = ReducerOrder()
        reducer.add_observer(found)
    if found is not None:
        found.layers = layers


# In the order of construction, which is the same on all ranks of a group. Not a list of weak
# references: up to Python 3.11 the garbage collector may shorten it while it is copied.
_active: "weakref.WeakValueDictionary[int, CoreReducer]" = weakref.WeakValueDictionary()
_replaced: "weakref.WeakSet[CoreReducer]" = weakref.WeakSet()
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_name(memory_of: dist.ProcessGroup | None) -> str:
    """Returns the name of a new Reducer, the same on all ranks."""
    # Counts only Reducers with shared memory. One rank may make other Reducers alone.
    if memory_of is None or traits(memory_of).native is None:
        return "a Reducer"
    return f"Reducer {_numbers.get(memory_of, 0) + 1}"


def _replaces(module: torch.nn.Module, new: set[int], other: CoreReducer) -> bool:
    """True if another Reducer is a leftover beside a new one, of parameters with these ids."""
    old = set(map(id, other.parameters))
    return old == new or (old < new and other.module is module)


def check_overlap(
    module: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    process_group: dist.ProcessGroup | None,
    sums: bool,
) -> None:
    """Raises a ValueError if another Reducer would give one of these another result."""
    group = process_group or dist.group.WORLD
    new = set(map(id, parameters.values()))
    for other in active_reducers():
        ids = set(map(id, other.parameters))
        both = [name for name, parameter in parameters.items() if id(parameter) in ids]
        if not both or _replaces(module, new, other):
            continue
        if (other.process_group or dist.group.WORLD) is not group:
            what = "averages in another process group"
        elif sums or other.comm.sums:
            what = 'has or gets reduce="sum", which would sum a gradient twice'
        else:
            continue
        raise ValueError(
            f"another Reducer has {shortened(both)}, too, and {what}: leave them out here with "
            f"ignore=, or call remove() on a Reducer that is no longer used"
        )


def add(reducer: CoreReducer, memory_of: dist.ProcessGroup | None) -> None:
    """Puts a new Reducer first in the launch order, and counts it.

    It replaces a Reducer all of whose parameters it has, if both have the same module or the same
    parameters: that one is a leftover, as when a cell of a notebook is run again.
    """
    if memory_of is not None:
        _numbers[memory_of] = _numbers.get(memory_of, 0) + 1
    new = set(map(id, reducer.parameters))
    for other in active_reducers():
        if _replaces(reducer.module, new, other):
            other.remove()
            remove(other)
            _replaced.add(other)
    _active[id(reducer)] = reducer
    active = active_reducers()
    for each in active if len(active) > 1 else []:
        if each.observer(ReducerOrder) is None:
            each.add_observer(ReducerOrder())
        if not new.isdisjoint(map(id, each.parameters)):
            each.set_shared(shared_parameters(each))


def check_current(reducer: CoreReducer) -> None:
    """Raises a RuntimeError if a later Reducer has replaced this one."""
    if reducer in _replaced:
        raise RuntimeError(
            "another Reducer has been made for the same parameters and has replaced this one: "
            "use the new one"
        )


def remove(reducer: CoreReducer) -> None:
    """Removes a Reducer from the launch order. Idempotent."""
    _active.pop(id(reducer), None)


def active_reducers() -> list[CoreReducer]:
    """Returns the Reducers that are in use, in launch order."""
    # Not `values()`, which fails if another thread makes a Reducer meanwhile.
    found = [reducer for ref in _active.valuerefs() if (reducer := ref()) is not None]
    return found[::-1]


def shared_parameters(reducer: CoreReducer) -> frozenset[int]:
    """Returns the indices of the parameters that another Reducer averages, too."""
    others = [map(id, other.parameters) for other in active_reducers() if other is not reducer]
    ids = set(chain.from_iterable(others))
    return frozenset(i for i, parameter in enumerate(reducer.parameters) if id(parameter) in ids)


class ReducerOrder(LaunchOrder):
    """One order for several Reducers, and for a Reducer and the layers that communicate.

    A Reducer launches after those before it, and they end a pass together. Full buckets wait if
    layers communicate and ranks may launch at different points of backward.
    """

    layers: Sequence[torch.nn.Module] = ()  # those of the Reducer's module with a group

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        # The pass for which `_ahead` is known.
        self._pass: BackwardPass | None = None
        # The Reducers that launch before this one in that pass, with their iterations.
        self._ahead: dict[CoreReducer, int] = {}

    def communicate(self) -> bool:
        """True if layers communicate in the Reducer's own group."""
        ours = self._reducer().process_group or dist.group.WORLD
        return any((layer.process_group or dist.group.WORLD) is ours for layer in self.layers)

    def may_launch(self) -> bool:
        reducer, active = self._reducer(), active_reducers()
        if not has_fixed_order(reducer) and self.communicate():
            return False
        if len(active) < 2:
            return True
        unused = reducer.observer(Unused) if reducer.allows_unused else None
        if unused is not None and unused.hides_parameters:
            # A reentrant checkpoint hides parameters, also of other Reducers, until the pass ends.
            return False
        if any(_is_inside(reducer, other) for other in active):
            return False  # another inner pass may add to these gradients
        if self._pass is not reducer.backward:
            # The graph decides who takes part. Which Reducers have begun differs between ranks.
            before = active[: active.index(reducer)] if reducer in active else []
            self._ahead = {
                other: other.iteration for other in before if _takes_part(other, reducer)
            }
            self._pass = reducer.backward
        for other, iteration in self._ahead.items():
            launched = other.average.next_bucket
            if other.iteration == iteration and launched < len(other.all_buckets):
                return False
            other.await_hook()
        fixed = all(has_fixed_order(each) for each in (reducer, *self._ahead))
        return fixed or not any(communicate(r) and _takes_part(r, reducer) for r in active)

    def end_backward(self) -> bool:
        reducer, active = self._reducer(), active_reducers()
        if reducer.backward.failed:
            return False
        for other in active:
            if _is_inside(reducer, other):
                # The outer Reducer's buckets may come first: another rank may have launched them.
                reducer.continue_in(other.backward)
                return True
        number = reducer.backward.number
        together = [r for r in active if _runs(r, number)]
        if reducer not in together:  # removed in the middle of the pass
            together.append(reducer)
        # Launches all buckets before the first wait, because `finish` issues collectives, too.
        complete = [r for r in together if r.launch_rest()]
        # Averages before steps: a norm is of all gradients, and Reducers may compare parameters.
        complete.sort(key=lambda r: r.step_bucket is not None)
        # Raises after all averages, since the other ranks need this rank's buckets.
        errors = [error for r in complete if (error := r.finish()) is not None]
        if errors:
            raise errors[0]
        return True

    def pass_ended(self) -> None:
        self._pass, self._ahead = None, {}

    def pass_failed(self, number: int) -> None:
        self.pass_ended()
        for other in active_reducers():
            if _runs(other, number):
                other.on_backward_error(number)


def _running(reducer: CoreReducer) -> BackwardPass | None:
    """Returns the Reducer's backward pass, unless an exception has ended it."""
    backward = reducer.backward
    return None if backward is None or backward.failed else backward


def _runs(reducer: CoreReducer, number: int) -> bool:
    backward = _running(reducer)
    return backward is not None and backward.number == number


def _is_inside(reducer: CoreReducer, other: CoreReducer) -> bool:
    """True if this Reducer's pass runs inside the other's, as in a reentrant checkpoint."""
    inner, outer = reducer.backward, _running(other)
    if inner is None or outer is None:
        return False
    # A pass in another thread is not nested. (On a GPU all passes share one thread.)
    return outer.thread == inner.thread and outer.number < inner.number


def _runs_in_order(other: CoreReducer, reducer: CoreReducer) -> bool:
    """True if the other has a pass under way whose launches need one order with this Reducer's."""
    ours, theirs = reducer.backward, _running(other)
    if ours is None or theirs is None or theirs.thread == ours.thread:
        return theirs is not None
    # Another thread's pass is on its own, unless both send in one group.
    return (other.process_group or dist.group.WORLD) is (reducer.process_group or dist.group.WORLD)


def _takes_part(other: CoreReducer, reducer: CoreReducer) -> bool:
    """True if the other averages in the backward pass in which this Reducer launches."""
    if not other.sync:
        return False
    unused = other.observer(Unused)
    # A pass may go through a module without using its parameters.
    return (
        _runs_in_order(other, reducer)
        or will_accumulate_any(other)
        or (unused is not None and unused.will_enter())
    )
