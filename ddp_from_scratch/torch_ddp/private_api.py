"""Private parts of torch's DistributedDataParallel that programs use nevertheless."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_from_scratch import comm_hooks
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.comm_hooks import average
from ddp_from_scratch.group import check_group
from ddp_from_scratch.options.buffers import BufferHook
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.torch_ddp.arguments import DelayedReduction

_BUILTIN = {
    "ALLREDUCE": comm_hooks.allreduce_hook,
    "FP16_COMPRESS": comm_hooks.fp16_compress_hook,
}


class WrappedReducer(Reducer):
    """A Reducer with the methods that pipelines and Lightning call on torch's."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Names the tensors where backward will begin, in place of the forward pass's outputs."""
        self.prepare_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        """Returns False: here buckets are only laid out again at the end of an average."""
        return False


class CopiedReducer(WrappedReducer):
    """The Reducer of a copy, which one rank may make alone."""

    def _meets(self) -> bool:
        """Returns False: sharing memory takes all ranks. They meet when the copy first averages."""
        return False


class TorchInternals:
    """The part of `DistributedDataParallel` that torch does not document."""

    # Set by `DistributedDataParallel`, the only subclass.
    reducer: WrappedReducer
    delayed: DelayedReduction | None
    _settings: dict[str, Any]
    _comm_hook: tuple[Any, CommHook] | None
    _builtin_hook: str | None
    _finalizer: Callable[[], Any]
    _build: Callable[[type[WrappedReducer], BufferHook | None], None]
    register_comm_hook: Callable[[Any, CommHook], None]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that take part."""
        return check_group(self._group)

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        # The default group is not held: when a program closes it, it must go, with gloo's threads.
        self._group = None if group is dist.group.WORLD else group

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if the buckets have their final layout."""
        return self.reducer.ready_order is not None

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Registers a comm hook by a name of `dist.BuiltinCommHookType`."""
        self.register_comm_hook(self._group, _BUILTIN[comm_hook_type.name])
        self._builtin_hook = str(comm_hook_type)

    def _remove_autograd_hooks(self) -> None:
        """Calls `Reducer.remove`."""
        self.reducer.remove()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepts False: outputs are those of the module itself, which here they always are.

        Raises:
            ValueError: `val` is True.
        """
        if val:
            raise ValueError("outputs are never cloned here")

    def _set_static_graph(self) -> None:
        """Acts as `static_graph=True` from now on. Idempotent."""
        self._settings["static_graph"] = self.static_graph = True
        self.reducer.set_static_graph()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over these ranks from now on; a no-op on a rank that is not among them.

        They must hold the same parameters. A new Reducer lays its buckets out again, with the cap
        that "auto" has settled on. A comm hook stays, with its state: a state that holds another
        group must be changed by the program.

        Raises:
            RuntimeError: gradients are under way.
        """
        if dist.get_rank(new_process_group) < 0:
            return
        self.reducer.check_complete()
        old, self.process_group = self._group, new_process_group
        if self.delayed is not None:
            self.delayed.process_group = new_process_group
        # The new Reducer gets the choice of "auto" and need not tune again.
        if self.reducer.bucket_cap_mb is not None:
            self._settings["bucket_cap_mb"] = self.reducer.bucket_cap_mb
            self._settings["overlap"] = self.reducer.overlap
        # Removes the old Reducer's hooks: each gradient is to be averaged once.
        self._finalizer()
        self._build(WrappedReducer, self.reducer.buffer_sync.hook)
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            # The hooks of `comm_hooks` have the process group as their state.
            self.reducer.register_comm_hook(self._group if state is old else state, hook)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Synchronises buffers with `hook(state, {name: buffer})` in place of rank 0's.

        Args:
            state: the hook's first argument.
            hook: returns None or futures, for which the end of backward waits.
            comm_hook_location: torch's `_BufferCommHookLocation`; None means after forward.
        """
        before = getattr(comm_hook_location, "name", "POST_FORWARD") == "PRE_FORWARD"
        self.reducer.buffer_sync.set_hook(BufferHook(state, hook, before))

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Sends one rank's buffers, or these tensors, to all; for buffer hooks."""
        self.reducer.buffer_sync.send(authoritative_rank, bufs)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: Any, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Marks parameters and buffers to be left alone; called before `module` is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                # torch's own mark: `_get_data_parallel_params` has no list of names.
                tensor._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Any]:
        """Yields the parameters, or (name, parameter) pairs, that are not ignored."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter


def wrapper_data(wrapper: Any, reducer: Reducer, builtin_hook: str | None) -> dict[str, Any]:
    """Returns settings and statistics of a `DistributedDataParallel`.

    Their keys are those of torch's logging data if they mean the same.
    """
    group, stats = wrapper.process_group, reducer.stats()
    data = {
        "module_name": type(reducer.module).__name__,
        "bucket_cap_bytes": stats.bucket_cap_bytes,
        "find_unused_parameters": int(stats.find_unused_parameters),
        "static_graph": int(stats.static_graph),
        "gradient_as_bucket_view": int(stats.gradient_as_bucket_view),
        "num_parameter_tensors": stats.parameters,
        "total_parameter_size_bytes": stats.parameter_bytes,
        "bucket_sizes": ", ".join(map(str, stats.bucket_bytes)),
        "has_rebuilt_buckets": int(stats.rebuilt),
        "iteration": stats.iteration,
        "world_size": dist.get_world_size(group),
        "rank": dist.get_rank(group),
        "backend_name": dist.get_backend(group),
        "device_ids": ", ".join(str(index) for index in wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "has_sync_bn": any("SyncBatchNorm" in type(m).__name__ for m in wrapper.module.modules()),
        "join_uneven_inputs": wrapper.joined_before(),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
    }
    if reducer.comm_hook is not average:
        # torch's name of a built-in hook, in place of the name of its function here.
        data["comm_hook"] = builtin_hook or stats.comm_hook
    return data


Class = TypeVar("Class", bound=type)


def derives_in_name_alone(theirs: type, ours: Class) -> Class:
    """Removes from `ours` all that `theirs` itself would pass on; changes and returns `ours`.

    Each attribute that `theirs` defines becomes the attribute that `ours` would have if it derived
    from the bases of `theirs` instead; without one, access raises AttributeError. Instances of
    `ours` still pass `isinstance(x, theirs)`.
    """
    position = ours.__mro__.index(theirs)
    before, behind = ours.__mro__[:position], ours.__mro__[position + 1 :]
    # Not a list of names: torch's later versions add more.
    for name, value in vars(theirs).items():
        # Python itself reads `__doc__`, `__annotations__` and the like in a class.
        of_python = name.startswith("__") and not hasattr(value, "__get__")
        if of_python or any(name in vars(base) for base in before):
            continue
        inherited = (vars(base)[name] for base in behind if name in vars(base))
        setattr(ours, name, next(inherited, _Absent(name)))
    return ours


class _Absent:
    """An attribute that a class does not have, although one of its bases does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        # Not another error: hasattr() must be False.
        raise AttributeError(f"{owner.__name__} of {owner.__module__} has no {self._name}")
