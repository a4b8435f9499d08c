"""Private parts of torch's DistributedDataParallel that programs use all the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import comm_hooks
from ddp_from_scratch.buckets.gradient_bucket import CommHook
from ddp_from_scratch.group import check_group
from ddp_from_scratch.reducer.reducer import Reducer
from ddp_from_scratch.sync.buffer_sync import BufferHook
from ddp_from_scratch.torch_ddp.delayed_reduction import DelayedReduction

_BUILTIN = {
    "ALLREDUCE": comm_hooks.allreduce_hook,
    "FP16_COMPRESS": comm_hooks.fp16_compress_hook,
}


class WrappedReducer(Reducer):
    """A Reducer that offers what pipelines and Lightning call of torch's between its passes."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Backward will begin at these, whatever forward has returned."""
        self.prepare_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        """Whether it has laid its buckets out anew; never here, but at the end of an average."""
        return False


class TorchInternals:
    """The part of `DistributedDataParallel` that torch does not document."""

    _group: dist.ProcessGroup | None
    reducer: WrappedReducer
    delayed: DelayedReduction | None
    _settings: dict[str, Any]
    _comm_hook: tuple[Any, CommHook] | None
    _builtin_hook: str | None
    _finalizer: Callable[[], Any]
    _build: Callable[[BufferHook | None], None]
    register_comm_hook: Callable[[Any, CommHook], None]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that take part."""
        return check_group(self._group)

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        # The default one is not held: it is to be gone when it is closed, with gloo's threads.
        self._group = None if group is dist.group.WORLD else group

    @property
    def find_unused_parameters(self) -> bool:
        """As given."""
        return bool(self._settings["find_unused_parameters"])

    @property
    def static_graph(self) -> bool:
        """As given, or as `_set_static_graph` has made it."""
        return bool(self._settings["static_graph"])

    @property
    def gradient_as_bucket_view(self) -> bool:
        """As given."""
        return bool(self._settings["gradient_as_bucket_view"])

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the buckets have been laid out anew, so that they stay as they are."""
        return self.reducer.ready_order is not None

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """As `register_comm_hook`, by a name of `dist.BuiltinCommHookType`."""
        self.register_comm_hook(self._group, _BUILTIN[comm_hook_type.name])
        self._builtin_hook = str(comm_hook_type)

    def _remove_autograd_hooks(self) -> None:
        """As `Reducer.remove`."""
        self.reducer.remove()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """False lets outputs be those of the module itself, which here they always are.

        Raises:
            ValueError: `val` is True.
        """
        if val:
            raise ValueError("outputs are never cloned here")

    def _set_static_graph(self) -> None:
        """As `static_graph=True`, from now on. Idempotent."""
        self._settings["static_graph"] = True
        self.reducer.set_static_graph()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Averages over these ranks from now on; a no-op on one that is not among them.

        They must hold the same parameters. The Reducer is a new one and lays its buckets out anew,
        with the cap that "auto" has settled on. A comm hook stays, with its state: one that knows
        a group has to be told another.

        Raises:
            RuntimeError: gradients are under way.
        """
        if dist.get_rank(new_process_group) < 0:
            return
        self.reducer.checks.check_complete()
        old, self.process_group = self._group, new_process_group
        if self.delayed is not None:
            self.delayed.process_group = new_process_group
        if self.reducer.bucket_cap_mb is not None:
            self._settings["bucket_cap_mb"] = self.reducer.bucket_cap_mb
            self._settings["overlap"] = self.reducer.overlap
        self._finalizer()
        self._build(self.reducer.buffer_sync.hook)
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            self.reducer.register_comm_hook(self._group if state is old else state, hook)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Lets `hook(state, {name: buffer})` synchronise buffers in place of rank 0's.

        Args:
            state: handed to the hook.
            hook: returns None or futures, which the end of backward waits for.
            comm_hook_location: torch's `_BufferCommHookLocation`; after forward if None.
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
        """Names of parameters and buffers that are left alone; before `module` is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Any]:
        """The parameters, or (name, parameter) pairs, that are not ignored."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter
