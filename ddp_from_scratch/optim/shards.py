r"""Which part of a step each rank does: all of it, or a share whose results all ranks get.

    gradients    rank 0   |  a0  |  b0  |        rank 1   |  a1  |  b1  |
                             \______\__________________/______/
    parameters            |  a - lr (a0 + a1) / 2  |  b - lr (b0 + b1) / 2  |
                             rank 0's share           rank 1's share

- "none": every rank steps everything.
- "node": a machine's ranks have one copy of parameters and state, and each steps its share of it. A
  part of the average exists only in the cache of the rank that steps with it. With several
  machines, the ranks with the same share on each machine average it.
- "world": every rank has all parameters, but only its share of the state. Gradients are
  reduce-scattered, each rank steps its share, and the parameters are all-gathered.
"""

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.operations import caller
from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.common.group import (
    all_gather_single,
    exchange,
    gather_objects,
    of_member,
    wait,
    wait_all,
)
from ddp_from_scratch.common.memory import as_real, grad_dtype, same_memory, zeros
from ddp_from_scratch.core.bucket import CommHook, FlatBucket, Future
from ddp_from_scratch.core.comm_hooks import OnGPU, average, comm_hook
from ddp_from_scratch.optim.flat_params import FlatParams, Span, can_move, overlapping
from ddp_from_scratch.optim.forward_waits import ForwardWaits
from ddp_from_scratch.optim.shard_policy import (
    Allocate,
    Segments,
    ShardPolicy,
    States,
    Unsharded,
    placed,
)
from ddp_from_scratch.optim.shared_parameters import note_shared
from ddp_from_scratch.optim.squares import BLOCK
from ddp_from_scratch.optim.update_rules import CACHE_LINE, ParamGroup, UpdateRule
from ddp_from_scratch.options.checks import Checks
from ddp_from_scratch.options.comm_hooks import Later
from ddp_from_scratch.options.launch_order import active_reducers
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.check_sync import DriftCheck, Mark, check_sync, setting_text
from ddp_from_scratch.sync.checksums import checksums, kind_of

# A bucket of at most this many bytes travels in the message of the checksums.
_MAX_CARRIED_NBYTES = 2**21


class Shards(ShardPolicy):
    """Each rank steps a share. After `backward_and_step` no rank has the averages."""

    def __init__(self, name: str, reducer: Reducer, rule: UpdateRule, overlap: bool) -> None:
        super().__init__(name, reducer, rule, overlap)
        self._reducer: Reducer
        # Weak, as a strong reference would keep a closed group's threads alive.
        self._made_in = weakref.ref(reducer.process_group or dist.group.WORLD)
        self._checked = False
        # By the first group and the number of groups: their settings, and these as a text.
        self._texts: dict[tuple[int, int], tuple[list[Any], str]] = {}
        self._membership = ""  # a checksum of which parameters each group has
        self._loaded = ""  # a text about the whole state loaded since the last step
        shared = overlapping([p for bucket in self._buckets for p in bucket.parameters()])
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters(), bucket.views, strict=True):
                if id(parameter) in shared or not can_move(parameter, view):
                    one = f"shape {tuple(parameter.shape)}, {parameter.dtype}"
                    end = ""
                    if (of_gradient := grad_dtype(parameter)) != parameter.dtype:
                        end = f" with gradients of {of_gradient}: leave grad_dtype out"
                    raise ValueError(
                        f"{name} needs parameters in memory of their own, of float32 or float64 "
                        f"on a CPU: it cannot move one of {one}{end}"
                    )

    @property
    def _group(self) -> dist.ProcessGroup:
        # Not kept, as that would keep a closed group's threads alive.
        return self._reducer.core.comm.open_group()

    @property
    def _buckets(self) -> Sequence[FlatBucket]:
        return self._reducer.core.flat_buckets

    def _ours(self) -> set[int]:
        return {id(parameter) for bucket in self._buckets for parameter in bucket.parameters()}

    def begin_step(self, max_norm: float | None) -> None:
        if (self._reducer.process_group or dist.group.WORLD) is not self._made_in():
            raise RuntimeError(
                f"{self._name} divides steps among the ranks of the process group in which it was "
                f"made, and the Reducer averages in another one now: make a new optimizer"
            )
        super().begin_step(max_norm)

    def before_arranging(self) -> None:
        if not self._checked:
            # The ranks' parameters become one copy, which would hide a difference.
            module, ours = self._reducer.module, self._ours()
            others = [n for n, p in module.named_parameters() if id(p) not in ours]
            check_sync(module, self._reducer.process_group, ignore=others)
            self._checked = True

    def arranged(
        self, segments: Mapping[FlatBucket, Segments], unflattened: Sequence[torch.Tensor]
    ) -> None:
        # Gradients in `.grad` may be local, so no parameter may be stepped alone.
        ours = self._ours()
        # Buckets have the same parameters in the same order on all ranks.
        members = [[(s.group, len(s.parameters)) for s in each] for each in segments.values()]
        self._membership, self._texts = _checksum(members), {}
        for parameter in unflattened:
            if id(parameter) in ours:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} cannot be moved any longer: "
                    f"its .data was replaced after {self._name} was made"
                )

    def mark_gradients(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, Mark]:
        # Each rank steps a share, so a gradient that one rank has changed changes a part of the
        # step on all ranks, and their parameters stay equal.
        drift = self._reducer.core.observer(DriftCheck)
        if drift is None or not drift.is_due:
            return {}
        rows = [(p, p.grad) for p in parameters if p.grad is not None]
        numbers = checksums([gradient for _, gradient in rows])
        return {p: (kind_of(g), n) for (p, g), n in zip(rows, numbers, strict=True)}

    def _text(self, groups: Sequence[ParamGroup]) -> str:
        """Returns what a step with these groups depends on, as ranks compare it."""
        clip = "" if self._max_norm is None else f", max_norm={setting_text(self._max_norm)}"
        return self._settings(groups) + clip + self._loaded

    def mark_loaded(self, states: States) -> None:
        # From the next step on each rank has a share, and no rank could see a difference.
        rows = [
            (name, key, torch.as_tensor(value))
            for name, parameter in self._reducer.module.named_parameters()
            for key, value in sorted(states.get(parameter, {}).items())
            if isinstance(value, (torch.Tensor, Number))
        ]
        numbers = checksums([tensor for *_, tensor in rows])
        marks = [(*row[:2], n) for row, n in zip(rows, numbers, strict=True)]
        self._loaded = f", after load_state_dict() of a state with checksum {_checksum(marks)}"

    def forget_loaded(self) -> None:
        self._loaded = ""

    def _settings(self, groups: Sequence[ParamGroup]) -> str:
        names = self._rule.settings
        values = [[_number(group[name]) for name in names] for group in groups]
        key = id(groups[0]), len(groups)
        if (known := self._texts.get(key)) is not None and known[0] == values:
            return known[1]
        texts, unlike = [], False
        for name, column in zip(names, zip(*values, strict=True), strict=True):
            if any(column):
                each = [str(setting_text(value)) for value in column]
                texts.append(f"{name}={each[0] if len(set(each)) == 1 else '/'.join(each)}")
                unlike = unlike or len(set(each)) > 1
        if unlike:
            texts.append(f"parameters of groups {self._membership}")
        self._texts[key] = values, ", ".join(texts)
        return self._texts[key][1]

    @contextmanager
    def averaging_with(self, hook: CommHook) -> Iterator[None]:
        """Uses a comm hook inside the context that may leave gradients local."""
        comm = self._reducer.core.comm
        before, state = comm.hook, comm.state
        if self._reducer.tree_reduction is None and before is not average:
            raise RuntimeError("gradients that stay local cannot go through a comm hook")
        self._reducer.core.set_hook(hook, state)
        try:
            yield
        finally:
            self._reducer.core.set_hook(before, state)

    def check_step(self) -> None:
        if self._reducer.core.joining:
            raise RuntimeError("every rank must step its share, so join() cannot be used")

    def members(self, segment: FlatParams) -> list[int]:
        """Returns the members that have gradients, after copying these into their buckets."""
        self.check_step()
        members = segment.in_place()
        if len(members) == len(segment.parameters):
            return members
        members.clear()
        rows = zip(segment.parameters, segment.param_views, strict=True)
        for index, (parameter, view) in enumerate(rows):
            if not same_memory(parameter, view):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} is not where {self._name} put "
                    f"it: its .data was replaced after the first step"
                )
            if parameter.grad is not None:
                # The buckets were rebuilt, or the program has set another `.grad`.
                if not same_memory(parameter.grad, segment.gradients[index]):
                    parameter.grad = segment.gradients[index].copy_(parameter.grad).detach()
                members.append(index)
        return members


class NodeShards(Shards):
    """A machine's ranks have one copy of parameters and state."""

    cuts = True

    def __init__(self, name: str, reducer: Reducer, rule: UpdateRule, overlap: bool) -> None:
        super().__init__(name, reducer, rule, overlap)
        reducer.core.comm.require_unowned_hook(name)
        group = traits(self._group).native
        if group is None:
            raise UsageError(
                f"{name} needs ranks that share memory, on Linux: a process group of the mpi "
                f"backend, or of gloo with several ranks on a machine and a Reducer with "
                f'shared_memory=True; shard="world" needs none'
            )
        if not all(group.is_shared(bucket.flat) for bucket in self._buckets):
            raise UsageError(
                f"{name} needs gradients in memory that the machine's ranks share, and there was "
                f"none: the Reducer's warning says why, or its module is a copy of a wrapped one, "
                f'and must be wrapped itself; shard="world" needs none'
            )
        self._shared = group
        self._moved = False  # tensors have moved, and the end of a step frees their old memory

    def allocate(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        self._moved = True
        return self._shared.empty(numel, like.dtype, for_all=True)

    def arranged(
        self, segments: Mapping[FlatBucket, Segments], unflattened: Sequence[torch.Tensor]
    ) -> None:
        super().arranged(segments, unflattened)
        if self._shared.checked_barrier.size > 1:  # several ranks on this machine
            for segment in chain.from_iterable(segments.values()):
                note_shared(segment.parameters)

    def averaging(self, clips: bool) -> AbstractContextManager[Any]:
        if clips or self._reducer.core.comm.sums:  # `step` needs the averages, or sums
            return nullcontext()
        # The ranks read each other's local gradients from shared memory, so buckets send nothing.
        return self.averaging_with(_keep_local)

    def step(self, segment: FlatParams, spans: Sequence[Span], group: ParamGroup) -> None:
        if not segment.gradient.numel():
            return
        # The ranks compare this text, because each steps its share for all.
        text = f"step with {self._text([group])} of parts {_checksum(spans)}"
        receive = partial(segment.update, spans, group)
        # A division: see `core/comm_hooks.py`.
        # In `step` all ranks have the same averages or sums already, and AVG keeps them.
        self._shared.reduce_to_owners(segment.gradient, dist.ReduceOp.AVG, receive, text)

    def end_step(self, buckets: Sequence[FlatBucket], groups: Sequence[ParamGroup]) -> None:
        # After this barrier all parameters are written, and no rank reads another's gradients.
        self.forget_loaded()
        end = self._shared.free_unused if self._moved else self._shared.barrier().wait
        self._moved = False
        end()


class WorldShards(Shards):
    """Every rank has all parameters, and its share of the state.

        gradients   |<- fc2.bias ->|<------ fc2.weight ------>|
        parameters  |<- fc2.bias ->|  |<------ fc2.weight ------>|        |
        shares      | rank 0             | rank 1             | rank 2    |

    The shares of a bucket's parameters are equal, for one all-gather. Its gradients have no gaps,
    so their parts may differ in size.
    """

    def __init__(self, name: str, reducer: Reducer, rule: UpdateRule, overlap: bool) -> None:
        super().__init__(name, reducer, rule, overlap)
        self._rank, self._size = self._group.rank(), self._group.size()
        self._is_native = traits(self._group).native is not None
        # The parameters of each bucket.
        self._flats: dict[FlatBucket, torch.Tensor] = {}
        # Where the part of each rank begins in the gradients of a bucket.
        self._bounds: dict[FlatBucket, list[int]] = {}
        # The buckets whose parameters are in the memory at this address.
        self._in_memory: dict[int, set[FlatBucket]] = {}
        # The waits for all-gathers under way. With `overlap`, forward passes call them.
        self._arriving: dict[FlatBucket, Callable[[], None]] = {}
        # The bucket whose all-gather also compares what the ranks have stepped with.
        self._carrier: FlatBucket | None = None
        # What this rank has stepped in this step.
        self._stepped: list[Sequence[Span]] = []
        # This rank's text and each rank's checksum, if they are compared later.
        self._to_compare: tuple[str, torch.Tensor] | None = None
        # On gloo, whose collectives of this kind send too much, or not while they receive.
        self._by_messages = reducer.core.device.type == "cpu" and not self._is_native
        self._waits = self._make_waits() if overlap and self._size > 1 else None

    def _make_waits(self) -> ForwardWaits:
        # Reducers watch a module's tables, which now become others. Not if they have changed: the
        # next forward pass must raise.
        found = [(reducer, reducer.observer(Checks)) for reducer in active_reducers()]
        each = [(checks.snapshot, reducer.module) for reducer, checks in found if checks]
        unchanged = [(one, module) for one, module in each if not one.looks_different(True)]
        waits = ForwardWaits(self._reducer.module, self.synchronize, self._arriving)
        for one, module in unchanged:
            one.look_at(module)
        return waits

    def _share(self, numel: int) -> int:
        """Returns the size of each share of so many elements."""
        return -(-numel // (BLOCK * self._size)) * BLOCK

    def allocator(self, bucket: FlatBucket) -> Allocate:
        like = bucket.flat
        line = CACHE_LINE // like.itemsize
        numel = sum(-(-parameter.numel() // line) * line for parameter in bucket.parameters())
        memory = self._group if self._is_native else None
        flat = zeros(self._share(numel) * self._size, like.dtype, like.device, memory)
        self._flats[bucket], begin = flat, 0

        def allocate_next(numel: int, _like: torch.Tensor) -> torch.Tensor:
            nonlocal begin
            begin += numel
            return flat[begin - numel : begin]

        return allocate_next

    def arranged(
        self, segments: Mapping[FlatBucket, Segments], unflattened: Sequence[torch.Tensor]
    ) -> None:
        super().arranged(segments, unflattened)
        self._flats = {bucket: self._flats[bucket] for bucket in segments}
        # By memory and not by parameter, since a program may read a view.
        self._in_memory.clear()
        for bucket, flat in self._flats.items():
            self._in_memory.setdefault(flat.untyped_storage().data_ptr(), set()).add(bucket)
        for bucket, each in segments.items():
            share, rows = self._flats[bucket].numel() // self._size, placed(each)
            self._bounds[bucket] = [
                sum(segment.gradients_before(rank * share - begin) for segment, begin in rows)
                for rank in range(self._size + 1)
            ]
            for segment, begin in rows:
                segment.own_only(self._rank * share - begin, (self._rank + 1) * share - begin)

        # Not on a GPU, for which the host would have to wait.
        on_cpu = self._reducer.core.device.type == "cpu"
        filled = [bucket for bucket in segments if on_cpu and self._flats[bucket].numel()]
        self._carrier = min(filled, key=lambda bucket: self._flats[bucket].nbytes, default=None)

    def averaging(self, clips: bool) -> AbstractContextManager[Any]:
        return self.averaging_with(self._make_hook(self._reducer.tree_reduction))

    def _make_hook(self, tree: Any) -> CommHook:
        """Returns a comm hook that averages only this rank's part of each bucket."""

        @comm_hook(one_collective=True, prescaled=tree is None)
        def reduce_scatter(state: Any, bucket: FlatBucket) -> Future:
            group, buffer, bounds = self._group, bucket.flat, self._bounds[bucket]
            if not buffer.numel():
                return _keep_local(state, bucket)
            if tree is not None:
                found: Future = tree.reduce_scatter(group, bucket, bounds)
                return found
            real = as_real(buffer)
            width = real.numel() // buffer.numel()
            parts = [real[begin * width : end * width] for begin, end in pairwise(bounds)]
            own = parts[self._rank]
            if self._by_messages:
                received = own.new_empty(self._size, own.numel())
                received[self._rank] = own
                works = exchange(group, parts, received.unbind())
            else:
                works = [of_member(dist.reduce_scatter(own, parts, group=group, async_op=True))]
                if not buffer.is_cpu:
                    return OnGPU(works[0], buffer)

            def finish() -> torch.Tensor:
                wait_all(works)
                if self._by_messages:
                    own.copy_(received[0])
                    for other in received[1:]:
                        own.add_(other)
                return buffer

            return Later(finish)

        return reduce_scatter

    def step(self, segment: FlatParams, spans: Sequence[Span], group: ParamGroup) -> None:
        super().step(segment, spans, group)
        self._stepped.append(spans)

    def end_step(self, buckets: Sequence[FlatBucket], groups: Sequence[ParamGroup]) -> None:
        text = f"step of parts {_checksum(self._stepped)} with {self._text(groups)}"
        self._stepped.clear()
        self.forget_loaded()
        for bucket in reversed(buckets):  # forward reads the last bucket first
            flat = self._flats[bucket]
            if bucket is not self._carrier:
                self._arriving[bucket] = partial(wait_all, self._gather(flat))
            elif self._is_native:
                self._arriving[bucket] = partial(wait_all, self._gather(flat, f" for a {text}"))
            else:
                self._arriving[bucket] = self._gather_and_compare(flat, text)
        if not self._overlap:
            self.synchronize()
            self._compare()

    def begin_step(self, max_norm: float | None) -> None:
        self._stepped.clear()  # of a step that has raised
        super().begin_step(max_norm)
        self.synchronize()
        self._compare()

    def synchronize(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        if not self._arriving:
            return
        read: set[FlatBucket] | None = None
        if parameters is not None:
            read = set()
            for key in map(_memory_of, parameters):
                if key is None:
                    read = None
                    break
                read |= self._in_memory.get(key, set())
        for bucket in [*self._arriving]:
            if read is None or bucket in read:
                self._arriving.pop(bucket, _no_wait)()

    def _gather(self, flat: torch.Tensor, label: str = "") -> Sequence[dist.Work]:
        """Starts to send this rank's share of a flat tensor to all ranks, and theirs to it.

        Ranks that share memory compare the `label`.
        """
        if not flat.numel():
            return []
        parts = flat.view(self._size, -1)
        if self._by_messages:
            return exchange(self._group, [parts[self._rank]] * self._size, parts.unbind())
        caller.op_label = label
        try:
            work = all_gather_single(flat, parts[self._rank], group=self._group, async_op=True)
        finally:
            caller.op_label = ""
        return [of_member(work)]

    def _gather_and_compare(self, flat: torch.Tensor, text: str) -> Callable[[], None]:
        """Starts to gather shares, each with a checksum of its rank's text; returns the wait."""
        parts, share = flat.view(self._size, -1), flat.numel() // self._size
        end = torch.full((2,), zlib.crc32(text.encode()), device="cpu").view(flat.dtype)
        # For a small bucket a copy takes less time than a second message.
        carried = share if flat.nbytes <= _MAX_CARRIED_NBYTES else 0
        rows = flat.new_empty(self._size, carried + end.numel())
        rows[self._rank] = torch.cat([parts[self._rank, :carried], end])
        works = [*(() if carried else self._gather(flat)), *self._gather(rows.view(-1))]

        def finish() -> None:
            wait_all(works)
            parts[:, :carried] = rows[:, :carried]
            self._to_compare = text, rows[:, carried:].contiguous().view(torch.int64)

        return finish

    def _compare(self) -> None:
        """Raises on all ranks if they have stepped with different settings. Collective."""
        if self._to_compare is None:
            return
        (text, numbers), self._to_compare = self._to_compare, None
        if len(set(numbers[:, 0].tolist())) == 1:
            return
        texts = gather_objects(text, self._reducer.process_group)
        other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
        raise RuntimeError(
            f"ranks took different steps, so parts of the parameters have moved differently: rank "
            f"0 took a {texts[0]}; rank {other} a {texts[other]}"
        )

    def whole_state(
        self, segments: Segments, states: States, label: str = ""
    ) -> dict[torch.Tensor, dict[str, Any]]:
        share = self._share(sum(segment.flat.numel() for segment in segments))
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for name in dict.fromkeys(name for s in segments for name in s.state if name != "step"):
            flat = segments[0].flat.new_zeros(share * self._size)
            for segment, begin in placed(segments):
                if name in segment.state:
                    own = begin + segment.own.start
                    flat[own : own + len(segment.own)] = segment.state[name][0]
            wait_all(self._gather(flat, label))
            for segment, begin in placed(segments):
                if name in segment.state:
                    windows = segment.windows(flat[begin : begin + segment.flat.numel()])
                    views = segment.state[name][1]
                    rows = zip(segment.parameters, views, windows, strict=True)
                    for parameter, view, window in rows:
                        # Otherwise it has no state yet, or one that was loaded, which is whole.
                        if states.get(parameter, {}).get(name) is view:
                            found.setdefault(parameter, {})[name] = window
        return found

    def sum_of_squares(self, segments: Sequence[Segments]) -> torch.Tensor:
        sums = torch.cat([self._squares(each) for each in segments])
        # Each block is one rank's, and 0 on the others, so the order of the sum does not matter.
        wait(dist.all_reduce(sums, group=self._group, async_op=True))
        return sums.sum()


@comm_hook(one_collective=True)
def _keep_local(_state: Any, bucket: FlatBucket) -> Future:
    """A comm hook that sends nothing, so the bucket keeps this rank's gradients."""
    future: Future = torch.futures.Future()
    future.set_result(bucket.flat)
    return future


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Returns where the tensor's memory begins; None if that is unknown, as under vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _no_wait() -> None:
    """Another thread has waited."""


def _number(value: Any) -> Any:
    """Returns numbers in the place of tensors, which may change in place."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, (list, tuple)) else value


def _checksum(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


SHARDS: dict[str, type[ShardPolicy]] = {"none": Unsharded, "node": NodeShards, "world": WorldShards}
