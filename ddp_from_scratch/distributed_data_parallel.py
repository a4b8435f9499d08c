"""torch's DistributedDataParallel, by name, arguments and behaviour, over `Reducer`.

    from ddp_from_scratch import DistributedDataParallel
    model = DistributedDataParallel(model)

A program written for torch's class goes on as it is. What the class does is done by parts that
work without it: `broadcast_parameters`, `Reducer`, `broadcast_buffers`, `join`.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from . import comm_hooks
from .broadcast import broadcast_buffers as send_buffers
from .broadcast import broadcast_parameters, send_tensors
from .bucket import CommHook
from .delayed import DelayedReduction
from .inputs import call_in, check_devices, moved
from .join import JoinableReducer
from .logging_data import facts
from .reducer import Reducer

_COMPRESSED = {
    torch.float16: comm_hooks.fp16_compress_hook,
    torch.bfloat16: comm_hooks.bf16_compress_hook,
}


_BUILTIN = {
    "ALLREDUCE": comm_hooks.allreduce_hook,
    "FP16_COMPRESS": comm_hooks.fp16_compress_hook,
}


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Wraps a module so that its gradients are averaged over ranks during backward.

    Construction compares the module on all ranks and sends rank 0's parameters and buffers to the
    others. Each forward pass that trains first sends rank 0's buffers (an evaluation does not, so
    one rank may evaluate alone). Each backward pass averages, unless it runs under `no_sync()`.

    Unlike torch's class it decides in backward, not in forward, whether to synchronise; averages
    also the second of two backward passes through one graph; and calls through `.module`
    synchronise, too.

    Args: as torch's class. `module`, `process_group`, `gradient_as_bucket_view`,
        `find_unused_parameters` and `static_graph` as `Reducer`, and
        device_ids: of a module on one GPU, that GPU alone: inputs are moved there.
        output_device: only together with `device_ids`; outputs stay where they are, as torch's do.
        dim: of `scatter` and `gather`, which nothing here does.
        broadcast_buffers: False sends no buffers, at construction neither.
        forward_sync_buffers: whether forward sends buffers; construction always does.
        init_sync: False trusts that all ranks hold the same module.
        bucket_cap_mb: as `Reducer`; `bucket_cap_mb_list` takes its place, if given.
        check_reduction: deprecated, without effect.
        delay_all_reduce_named_params: (name, parameter) pairs that are averaged on their own when
            the gradient of `param_to_hook_all_reduce` is ready.
        mixed_precision: `torch.nn.parallel.distributed._MixedPrecision`: the dtypes of parameters
            and inputs during forward, of what is sent, and of buffers. `.grad` and the parameters
            keep theirs.
        device_mesh: of one dimension, in place of `process_group`.
        skip_all_reduce_unused_params: as `Reducer`'s `skip_unused`.
        batched_grad_copy: gradients are always copied in one kernel for each bucket.
        lazy_bucket_allocation: only False.

    Attributes:
        module: the wrapped module.
        reducer: what averages its gradients.

    Raises:
        ValueError, RuntimeError: as torch's class, and as `broadcast_parameters` and `Reducer`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | Sequence[float] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        delayed = list(delay_all_reduce_named_params or ())
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time"
            )
        if lazy_bucket_allocation:
            raise ValueError("lazy_bucket_allocation=True is not supported: buckets are kept")
        if check_reduction:
            warnings.warn("check_reduction is deprecated", FutureWarning, stacklevel=2)
        if broadcast_buffers is None:
            broadcast_buffers = True
        else:
            warnings.warn(
                "broadcast_buffers is deprecated; forward_sync_buffers is for forward passes alone",
                FutureWarning,
                stacklevel=2,
            )
        self.module = module
        self.process_group = _group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in bucket_cap_mb_list or ()]
        self.dim, self.mixed_precision = dim, mixed_precision
        self.forward_sync_buffers = (
            broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        )
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore |= {name for name, _ in delayed}
        parameters = self._checked_parameters()
        self.device = parameters[0].device
        self.device_ids, self.output_device = check_devices(device_ids, output_device, parameters)
        self._settings: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb_list or bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "skip_unused": skip_all_reduce_unused_params,
        }
        if init_sync:
            ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            if forward_sync_buffers is None and not broadcast_buffers:
                ignore |= {name for name, _ in module.named_buffers()}
            broadcast_parameters(module, 0, self.process_group, ignore)
        self._buffer_hook: tuple[Any, Callable[..., Any], bool] | None = None
        self._builtin_hook: str | None = None
        self.delayed: DelayedReduction | None = None
        if param_to_hook_all_reduce is not None:
            self.delayed = DelayedReduction(
                [parameter for _, parameter in delayed],
                param_to_hook_all_reduce,
                self.process_group,
            )
        self._build()

    def _build(self) -> None:
        """The parts that know the process group: a copy of this module makes its own."""
        self.reducer = Reducer(
            self.module, self.process_group, ignore=self.parameters_to_ignore, **self._settings
        )
        # The module may be wrapped anew, or live on: this wrapper's hooks go with it. So nothing
        # here may keep the wrapper alive.
        weakref.finalize(self, self.reducer.remove)
        self._joinable = JoinableReducer(self.reducer, _weakly(self._sync_buffers))
        self._joinable.ignore = frozenset(self.parameters_to_ignore)
        if self.mixed_precision is not None:
            self._lower_precision()
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    # Forward ------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module, with inputs on its device; sends buffers first if this trains."""
        trains = torch.is_grad_enabled() and self.module.training
        if torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                self.reducer.check_forward()  # before this rank waits for others that do not come
            self._joinable.notify()
        if self.device_ids:
            device = torch.device("cuda", self.device_ids[0])
            inputs, kwargs = moved(inputs, device), moved(kwargs, device)
        dtype = None if self.mixed_precision is None else self.mixed_precision.param_dtype
        if dtype is None:
            output = self.module(*inputs, **kwargs)
        else:
            output = call_in(dtype, self.module, inputs, kwargs, self.parameters_to_ignore)
        if trains and self.reducer.sync and self._buffer_hook and not self._buffer_hook[2]:
            self._run_buffer_hook()
        return output

    def _sync_buffers(self, src: int) -> None:
        """Before a forward pass that trains and is synchronised: rank `src`'s buffers to all."""
        if not self.module.training or not self.will_sync_module_buffers():
            return
        if self._buffer_hook is not None:
            if self._buffer_hook[2]:
                self._run_buffer_hook()
            return
        buffers = tuple(self.module.buffers())
        # An earlier forward pass may still need them for its backward, and they may be the same.
        with torch.autograd._unsafe_preserve_version_counter(buffers):  # type: ignore[attr-defined]
            send_buffers(self.module, src, self.process_group, self.parameters_to_ignore)

    def will_sync_module_buffers(self) -> bool:
        """Whether forward passes that train send buffers."""
        return self.forward_sync_buffers and any(
            name not in self.parameters_to_ignore for name, _ in self.module.named_buffers()
        )

    def _run_buffer_hook(self) -> None:
        assert self._buffer_hook is not None
        state, hook, _ = self._buffer_hook
        ignore = self.parameters_to_ignore
        futures = hook(
            state, {name: b for name, b in self.module.named_buffers() if name not in ignore}
        )
        if futures is not None:
            self.reducer.futures += futures if isinstance(futures, list) else [futures]

    # What torch's class offers ------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes average; `no_sync()` sets it to False and back."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync = value

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated locally; the next backward outside averages the sum."""
        with self.reducer.no_sync():
            yield

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """As `Reducer.register_comm_hook`; the hook keeps torch's signature."""
        self.reducer.register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """As `register_comm_hook`, by a name of `dist.BuiltinCommHookType`."""
        self.register_comm_hook(self.process_group, _BUILTIN[comm_hook_type.name])
        self._builtin_hook = str(comm_hook_type)

    def _remove_autograd_hooks(self) -> None:
        """As `Reducer.remove`."""
        self.reducer.remove()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Sends one rank's buffers, or these tensors, to all; for buffer hooks."""
        if bufs is None:
            send_buffers(
                self.module, authoritative_rank, self.process_group, self.parameters_to_ignore
            )
        else:
            send_tensors(list(bufs), authoritative_rank, self.process_group)

    @property
    def _authoritative_rank(self) -> int | None:
        """The rank whose parameters all have after `join()`."""
        return self._joinable.last_rank

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """As `ddp.join`, with this class's buffers."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without data does; torch's `Join` calls this."""
        return self._joinable.join_hook(**kwargs)

    @property
    def join_device(self) -> torch.device:
        """Where the tensors that ranks exchange lie."""
        return self._joinable.join_device

    @property
    def join_process_group(self) -> Any:
        """The ranks that take part."""
        return self._joinable.join_process_group

    @property
    def _join_config(self) -> Any:
        return self._joinable._join_config

    @_join_config.setter
    def _join_config(self, value: Any) -> None:
        if "_joinable" in self.__dict__:  # not yet in Joinable's own __init__
            self._joinable._join_config = value

    def _set_static_graph(self) -> None:
        """As `static_graph=True`, from now on. Idempotent."""
        self._settings["static_graph"] = True
        self.reducer.set_static_graph()

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
        self._buffer_hook = (state, hook, before)

    def logging_data(self) -> dict[str, Any]:
        """What there is to know about this wrapper; keys as torch's where they mean the same."""
        hook = {"comm_hook": self._builtin_hook} if self._builtin_hook else {}
        return {
            **facts(self.reducer),
            **hook,
            "world_size": dist.get_world_size(self.process_group),
            "rank": dist.get_rank(self.process_group),
            "backend_name": dist.get_backend(self.process_group),
            "device_ids": ", ".join(str(index) for index in self.device_ids or ()),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "has_sync_bn": any("SyncBatchNorm" in type(m).__name__ for m in self.module.modules()),
            "join_uneven_inputs": self._joinable.last_rank is not None,
            "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
        }

    _get_ddp_logging_data = logging_data

    # Copies -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group not in (None, dist.group.WORLD):
            raise RuntimeError("only a wrapper on the default process group can be copied")
        if self.delayed is not None:
            raise RuntimeError("a wrapper with delay_all_reduce_named_params cannot be copied")
        state = self.__dict__.copy()
        for name in ("process_group", "reducer", "_joinable"):
            del state[name]
        state["_load_state_dict_pre_hooks"] = type(self._load_state_dict_pre_hooks)()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = None
        self._build()

    # Construction -------------------------------------------------------------------------------

    def _checked_parameters(self) -> list[torch.nn.Parameter]:
        ours = [
            parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        if any(torch.nn.parameter.is_lazy(parameter) for parameter in ours):
            raise RuntimeError(
                "the module has uninitialized parameters: run one forward pass on every rank "
                "before wrapping it in DistributedDataParallel"
            )
        if not any(parameter.requires_grad for parameter in ours):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient."
            )
        return ours

    def _lower_precision(self) -> None:
        precision = self.mixed_precision
        sent = precision.reduce_dtype or precision.param_dtype
        if sent in _COMPRESSED:
            self.register_comm_hook(self.process_group, _COMPRESSED[sent])
        elif sent not in (None, torch.float32, torch.float64):
            raise ValueError(f"gradients cannot be sent as {sent}")
        if precision.buffer_dtype is not None:
            for name, buffer in self.module.named_buffers():
                if name not in self.parameters_to_ignore and buffer.is_floating_point():
                    buffer.data = buffer.to(precision.buffer_dtype)


def _weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    reference = weakref.WeakMethod(method)

    def call(src: int) -> None:
        found = reference()
        if found is not None:
            found(src)

    return call


def _group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup | None:
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def _add_prefix(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any
) -> None:
    """Lets the wrapper load the state dict of the bare module, too."""
    inside = [key for key in state_dict if key.startswith(prefix)]
    if not any(key.startswith(f"{prefix}module.") for key in inside):
        for key in inside:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
