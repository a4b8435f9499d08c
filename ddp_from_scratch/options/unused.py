"""Parameters without a gradient: `find_unused_parameters`, `static_graph`, `skip_unused`."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _find_tensors

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.common.group import of_member, wait
from ddp_from_scratch.core.bucket import Bucket
from ddp_from_scratch.core.policies import Usage
from ddp_from_scratch.core.reducer import CoreReducer

_requires_grad = attrgetter("requires_grad")
# In nested tuples, lists, dicts and dataclasses, as for torch's DistributedDataParallel.
find_tensors: Callable[[object], Iterable[torch.Tensor]] = _find_tensors


def reached(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Returns the leaves that backward would reach; None if a reentrant checkpoint hides some."""
    leaves = [output for output in outputs if output.is_leaf and output.requires_grad]
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):
            leaves.append(node.variable)
        # A reentrant checkpoint builds its part of the graph during backward.
        elif node.name() == "CheckpointFunctionBackward":
            return None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return leaves


class _ForwardGraph:
    def __init__(self, reached: set[int] | None, others: Iterable[torch.Tensor]) -> None:
        self.reached = reached  # indices of the Reducer's parameters; None means unknown
        self.others: list[weakref.ref[torch.Tensor]] = [weakref.ref(leaf) for leaf in others]


class Unused(Usage):
    """Lets parameters get no gradient in a backward pass.

    The graph of each forward pass is walked. Parameters that backward cannot reach are marked
    unused when it enters the graph at an output, before a gradient is ready; others at the end.
    `torch.autograd.grad` is ignored, since it accumulates nothing in `.grad`. Ranks exchange which
    parameters they used: with `find_unused` in each average, with a static graph in the first.
    """

    def __init__(self, find_unused: bool, static: bool, skip: bool) -> None:
        self.find_unused = find_unused
        self.is_static: bool = static
        self.skip: bool = skip
        # True after the first average of these ranks. That one skips no bucket, since a rank may
        # have gradients that are older than its Reducer.
        self._has_agreed = False
        # Parameters used since the last average, including passes under no_sync().
        self._used: set[int] = set()
        # Static graph only: parameters that some rank used in the first average of these ranks.
        self._used_by_any: set[int] | None = None
        # Static graph only: parameters used now that are not among those.
        self._unforeseen: set[int] = set()

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._count = len(reducer.parameters)
        # A `.grad` that is older than the Reducer is averaged, too, though no hook has seen it.
        self._inherited = {i for i, p in enumerate(reducer.parameters) if p.grad is not None}
        # Static graph only: how many gradients each parameter had in the first pass, with
        # checkpointing perhaps more than one. A parameter is ready when it has had as many.
        self._expected: Counter[int] | None = None
        # Static graph only: how many it has had in this pass.
        self._counted = Counter[int]()
        self._index_of = {id(p): index for index, p in enumerate(reducer.parameters)}
        # Weak: the hooks on a graph own its record, which disappears with the graph.
        # By id. Not a WeakSet: a Reducer's pass in another thread reads them while this one adds.
        self._by_id: weakref.WeakValueDictionary[int, _ForwardGraph] = weakref.WeakValueDictionary()
        self._last: _ForwardGraph | None = (
            None  # the last walk's record, which a static graph reuses
        )

    @property
    def allows_unused(self) -> bool:
        return self.find_unused or self.is_static

    @property
    def varies(self) -> bool:
        """True if the set of used parameters may change from pass to pass."""
        return self.find_unused and not self.is_static

    fixed_layout = varies

    def set_static(self) -> None:
        if not self.is_static:
            self._last = None  # earlier passes may have had another graph
            self.is_static = True

    # Forward ------------------------------------------------------------------------------------

    def prepare(self, outputs: object) -> None:
        """Hooks the nodes of all tensors in `outputs`. Walks their graph unless it is static."""
        # Transforms of torch.func accumulate nothing, and hide the parameters.
        if not self.allows_unused or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        # While all parameters are frozen, no average happens with a static graph, and its first
        # pass is still to come.
        if self.is_static and not any(map(_requires_grad, self._reducer().parameters)):
            return
        tensors = [tensor for tensor in find_tensors(outputs) if tensor.requires_grad]
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        if not nodes:
            return
        if self._last is None or not self.is_static:
            self._last = self._search(tensors)
        self._by_id[id(self._last)] = self._last
        for node in nodes:
            # Weak, so that a graph does not keep the Reducer alive.
            node.register_prehook(partial(_enter, weakref.ref(self), self._last))

    on_forwarded = prepare

    def _search(self, outputs: Sequence[torch.Tensor]) -> _ForwardGraph:
        """Walks the graph of these tensors."""
        with torch.profiler.record_function("search_unused_parameters"):
            leaves = reached(outputs)
        if leaves is None:
            return _ForwardGraph(None, ())
        known = self._index_of
        others = [leaf for leaf in leaves if id(leaf) not in known]
        return _ForwardGraph({known[id(leaf)] for leaf in leaves if id(leaf) in known}, others)

    def _forwards(self) -> list[_ForwardGraph]:
        return [found for ref in self._by_id.valuerefs() if (found := ref()) is not None]

    @property
    def hides_parameters(self) -> bool:
        """True if a graph has a reentrant checkpoint, which may use any parameter."""
        return any(forward.reached is None for forward in self._forwards())

    def will_enter(self) -> bool:
        """True if the pass that autograd executes goes through one of these graphs."""
        return any(map(self._accumulates, self._forwards()))

    def _accumulates(self, forward: _ForwardGraph) -> bool:
        """True for `backward()`, False for `torch.autograd.grad`."""
        if forward.reached:
            return any(will_accumulate(self._reducer().parameters[i]) for i in forward.reached)
        # A static graph's record is from an earlier step, whose other leaves may be freed.
        others = [other() for other in forward.others]
        return None in others or any(leaf is not None and will_accumulate(leaf) for leaf in others)

    # Backward -----------------------------------------------------------------------------------

    def on_enter(self, forward: _ForwardGraph) -> None:
        """Marks parameters unused when backward enters the graph of a forward pass."""
        reducer: CoreReducer | None = self._reducer()
        if reducer is None or id(forward) not in self._by_id:
            return  # the Reducer was removed
        if not (self.hides_parameters or self._accumulates(forward)):
            return
        reducer.begin_early(partial(self._find_unused, forward))

    def _find_unused(self, forward: _ForwardGraph) -> set[int]:
        """Returns the parameters that get no gradient in the pass that goes through this graph."""
        everything = set(range(self._count))
        if self._expected is not None:
            return everything.difference(self._expected)
        if self.is_static or self.hides_parameters:
            return set()
        # The pass may execute more than this walk has seen: several forward passes.
        rest, parameters = everything - (forward.reached or set()), self._reducer().parameters
        return {index for index in rest if not will_accumulate(parameters[index])}

    def on_gradient(self, index: int) -> None:
        self._used.add(index)

    def is_last_gradient(self, index: int) -> bool:
        if not self.is_static:
            return True
        self._counted[index] += 1
        return self._expected is not None and self._counted[index] == self._expected[index]

    def skips(self, bucket: Bucket) -> bool:
        return self.skip and self._has_agreed and self._used.isdisjoint(bucket.members)

    def pass_ended(self) -> None:
        if self.allows_unused:
            self._reducer().mark_unused(range(self._count))

    def agree_used(self) -> set[int] | None:
        """Returns the parameters that some rank used since the last average; None means all."""
        reducer: CoreReducer = self._reducer()
        used, self._used = self._used, set()
        # `zero_grad()` may have dropped some of these gradients.
        inherited = {i for i in self._inherited if reducer.parameters[i].grad is not None} - used
        self._inherited = set()
        self._has_agreed = True
        if not self.allows_unused:
            return None
        if self._used_by_any is not None:
            # `is_last_gradient` counts no gradients under no_sync(), but `used` holds them.
            self._unforeseen = used - self._used_by_any
            return self._used_by_any
        group = reducer.comm.open_group()
        # Pinned memory, so that the copy is asynchronous and the host does not wait for the GPU.
        pinned = gpu.is_gpu(reducer.device)
        mine = torch.zeros(self._count, dtype=torch.int32, device="cpu", pin_memory=pinned)
        mine[list(used)] = 1
        # `beyond` exceeds the world size, so one sum holds two counts: modulo `beyond` the ranks
        # that used a parameter, divided by it the ranks that inherited its gradient.
        mine[list(inherited)] = beyond = 1 + group.size()
        counts = mine.to(reducer.device, non_blocking=True)
        work = of_member(dist.all_reduce(counts, group=group, async_op=True))
        # A rank that used all parameters knows the answer and does not wait.
        if len(used) < self._count:
            wait(work)
            found = counts.tolist()
            used = {index for index, times in enumerate(found) if times % beyond}
            inherited = {index for index, times in enumerate(found) if times >= beyond}
        if self.is_static:
            self._used_by_any = used
        return used | inherited

    def misused(self) -> RuntimeError | None:
        if not self.is_static:
            return None
        reducer: CoreReducer = self._reducer()
        if reducer.by_hand:
            return self._error_by_hand(reducer)
        now, self._counted = self._counted, Counter()
        then = self._expected = now if self._expected is None else self._expected
        differences = {i: (now[i], then[i]) for i in range(self._count) if now[i] != then[i]}
        unforeseen = sorted(self._unforeseen.difference(differences))
        differences |= dict.fromkeys(unforeseen, (1, 0))
        if not differences:
            return None
        counts = [f"{reducer.names[i]} {n} instead of {t}" for i, (n, t) in differences.items()]
        return RuntimeError(
            f"static_graph=True, but this backward pass on rank {reducer.rank} differs from the "
            f"first in its numbers of gradients: {shortened(counts)}"
        )

    def _error_by_hand(self, reducer: CoreReducer) -> RuntimeError | None:
        if not self._unforeseen:
            return None
        names = [reducer.names[index] for index in sorted(self._unforeseen)]
        return RuntimeError(
            f"static_graph=True, but average_gradients() on rank {reducer.rank} found gradients "
            f"that no rank had in the first average: {shortened(names)}. These stay local: give "
            f"all parameters a gradient in the first average, or leave static_graph out"
        )

    def on_abort(self) -> None:
        # One rank may drop and repeat its part of a step for which the others wait. So it keeps
        # what all have agreed on.
        self._used, self._expected, self._counted = set(), None, Counter()

    def on_set_step(self) -> None:
        self.on_abort()
        self._used_by_any, self._has_agreed = None, False

    def remove(self) -> None:
        self._by_id.clear()  # graphs that are still alive do not enter


def _enter(unused: "weakref.ref[Unused]", forward: _ForwardGraph, _gradients: Any) -> None:
    if (found := unused()) is not None:
        found.on_enter(forward)


def will_accumulate_any(reducer: Any) -> bool:
    """True if the backward pass under way will add to the `.grad` of one of its parameters."""
    try:
        # No Python call for each parameter: there may be thousands.
        return any(map(torch._C._will_engine_execute_node, reducer.hooks.nodes))
    except RuntimeError:  # autograd.grad with respect to one of them
        return any(map(will_accumulate, reducer.parameters))


def will_accumulate(parameter: torch.Tensor) -> bool:
    """True if the backward pass under way will add to this parameter's `.grad`."""
    if not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad with respect to this parameter
        return False
