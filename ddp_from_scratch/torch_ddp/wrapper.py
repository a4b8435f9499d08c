"""torch's DistributedDataParallel, with its name, arguments and behaviour, over `Reducer`."""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.func import functional_call

from ddp_from_scratch.common.arguments import check_names, known_names
from ddp_from_scratch.common.group import check_group
from ddp_from_scratch.core.bucket import CommHook
from ddp_from_scratch.core.hooks import current_pass
from ddp_from_scratch.core.layout import Caps
from ddp_from_scratch.options import comm_hooks
from ddp_from_scratch.options.launch_order import check_current
from ddp_from_scratch.sync.broadcast import MESSAGE_BYTES, broadcast_parameters
from ddp_from_scratch.torch_ddp import internals
from ddp_from_scratch.torch_ddp.forward_sync import ForwardSync
from ddp_from_scratch.torch_ddp.internals import WrappedReducer, moved
from ddp_from_scratch.torch_ddp.join import JoinableReducer
from ddp_from_scratch.torch_ddp.logger import Logger


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Wraps a module so that its gradients are averaged over ranks during backward.

    The constructor compares the module on all ranks, and sends rank 0's parameters and buffers to
    all. Each backward pass outside `no_sync()` averages, and sends rank 0's buffers at its end.
    Forward passes send nothing, so one rank may evaluate alone.

    Gradients stay local if forward or backward, or both, run under `no_sync()`. Unlike torch's
    class, this class also averages a second backward pass through one graph, and synchronises calls
    through `.module`.

    Args: as torch's class. `module`, `process_group`, `gradient_as_bucket_view`,
        `find_unused_parameters` and `static_graph` as `Reducer`, and
        device_ids: the GPU of a module on a single GPU; inputs are moved there.
        output_device: only together with `device_ids`; as in torch, outputs are not moved.
        dim, check_reduction, batched_grad_copy: without effect.
        broadcast_buffers: False sends no buffers, not even at construction.
        forward_sync_buffers: True if forward passes use rank 0's buffers; the first always does.
        init_sync: False skips the broadcast and the comparison of buffers: all ranks must hold the
            same module.
        bucket_cap_mb: as `Reducer`; `bucket_cap_mb_list` replaces it, if given.
        mixed_precision: `torch.nn.parallel.distributed._MixedPrecision`: the dtypes of parameters
            and inputs during forward, of sent gradients, and of buffers. `.grad` and the parameters
            keep their dtype.
        device_mesh: a one-dimensional mesh instead of `process_group`. If it is part of a larger
            mesh, the other dimensions may shard the module's parameters (DTensors).
        skip_all_reduce_unused_params: as `Reducer`'s `skip_unused`.
        delay_all_reduce_named_params, param_to_hook_all_reduce: only None.
        lazy_bucket_allocation: only False; buckets keep their memory.
        check_every, stall_after, straggler_every, shared_memory, fuse_wgrad, reduce,
            check_first_average, local_steps: not in torch; as `Reducer`.

    Attributes:
        module: the wrapped module.
        reducer: averages its gradients.

    Raises:
        ValueError, RuntimeError: as torch's class, `broadcast_parameters` and `Reducer`.
    """

    reducer: WrappedReducer

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: Caps = None,
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
        *,
        check_every: int | None = None,
        stall_after: float | str | None = "auto",
        straggler_every: int | None = None,
        shared_memory: bool = True,
        fuse_wgrad: bool = False,
        reduce: Literal["mean", "sum"] = "mean",
        check_first_average: bool = True,
        local_steps: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported: "
                "put these parameters into a module with a ddp.Reducer of its own"
            )
        if lazy_bucket_allocation:
            raise ValueError(
                "lazy_bucket_allocation=True is not supported, because buckets keep their memory: "
                "gradient_as_bucket_view=True saves the memory that gradients take beside them"
            )
        if check_reduction:
            warnings.warn("check_reduction is deprecated", FutureWarning, stacklevel=2)
        if broadcast_buffers is None:
            broadcast_buffers = True
        else:
            text = "broadcast_buffers is deprecated: forward_sync_buffers is for forward passes"
            warnings.warn(text, FutureWarning, stacklevel=2)
        self.module = module
        group = internals.chosen_group(module, process_group, device_mesh)
        self.process_group: dist.ProcessGroup = group
        self.device_mesh = device_mesh
        caps = [int(cap * 2**20) for cap in bucket_cap_mb_list or ()]
        self.bucket_bytes_cap_list: list[int] = caps
        self.dim = dim
        self.mixed_precision = mixed_precision
        self.find_unused_parameters = find_unused_parameters
        self.static_graph: bool = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        marked = check_names(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore: frozenset[str] = frozenset(marked)
        ignore = known_names(marked, module)  # torch's class takes names that the module lacks
        everyone = module.named_parameters()
        parameters = [p for name, p in everyone if name not in self.parameters_to_ignore]
        if not any(parameter.requires_grad for parameter in parameters):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient."
            )
        self.device: torch.device = parameters[0].device
        devices = internals.checked_devices(device_ids, output_device, parameters)
        self.device_ids: list[int] | None = devices[0]
        self.output_device: int | None = devices[1]
        # `_build` runs again in a copy and for another process group.
        self._settings: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb_list or bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "skip_unused": skip_all_reduce_unused_params,
            "sync_buffers": (
                broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
            ),
            "check_every": check_every,
            "stall_after": stall_after,
            "straggler_every": straggler_every,
            "shared_memory": shared_memory,
            "fuse_wgrad": fuse_wgrad,
            "reduce": reduce,
            "check_first_average": check_first_average,
            "local_steps": local_steps,
        }
        if init_sync:
            # `forward_sync_buffers` applies only to forward passes; construction sends buffers.
            if forward_sync_buffers is None and not broadcast_buffers:
                ignore |= {name for name, _ in module.named_buffers()}
            broadcast_parameters(module, 0, self.process_group, ignore)
        self._comm_hook: tuple[Any, CommHook] | None = None  # as registered; a new Reducer gets it
        if mixed_precision is not None:
            internals.cast_buffers(module, mixed_precision.buffer_dtype, self.parameters_to_ignore)
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.logger: Logger = Logger(self)
        self._build(WrappedReducer)

    def _build(self, kind: type[WrappedReducer]) -> None:
        self._forward_sync = ForwardSync()
        self.reducer = kind(
            self.module,
            self._group,
            ignore=known_names(self.parameters_to_ignore, self.module),
            observers=[self._forward_sync],
            **self._settings,
        )
        # Removes the hooks when the wrapper is freed, so nothing here may reference the wrapper.
        self._finalizer = weakref.finalize(self, self.reducer.remove)
        self._joinable = JoinableReducer(self.reducer)
        if (precision := self.mixed_precision) is not None:
            hook = internals.HOOKS[precision.reduce_dtype or precision.param_dtype]
            if hook is not None:
                self.reducer.register_comm_hook(self._group, hook)

    # Forward ------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module with inputs moved to its device."""
        if torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                # Before `notify`, which tells ranks without data whether this step averages.
                self._forward_sync.begin_forward()
                # Raises before `notify`, where this rank might wait for others forever.
                with self.logger.errors():
                    self.reducer.check_forward()
            self._joinable.notify()
        if self.device_ids:
            device = torch.device("cuda", self.device_ids[0])
            inputs, kwargs = moved(inputs, device), moved(kwargs, device)
        dtype = None if self.mixed_precision is None else self.mixed_precision.param_dtype
        if dtype is None:
            return self.module(*inputs, **kwargs)
        # The parameters keep their dtype, and autograd propagates gradients through the cast.
        lowered = {
            name: parameter.to(dtype)
            for name, parameter in self.module.named_parameters()
            if parameter.is_floating_point() and name not in self.parameters_to_ignore
        }
        inputs, kwargs = moved(inputs, dtype=dtype), moved(kwargs, dtype=dtype)
        return functional_call(self.module, lowered, inputs, kwargs)

    def will_sync_module_buffers(self) -> bool:
        """True if buffers are sent."""
        buffer_sync = self.reducer.buffer_sync
        return buffer_sync.enabled and bool(buffer_sync.named())

    # What torch's class offers ------------------------------------------------------------------

    require_backward_grad_sync: Any = property(
        attrgetter("_forward_sync.required"),
        lambda self, value: self._forward_sync.set_required(value),
        doc="True if forward and backward passes average; `no_sync()` sets it to False and back.",
    )

    @property
    def require_forward_param_sync(self) -> bool:
        """Always True: buffers come with each average, also after forward under `no_sync()`."""
        return True

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        if not value:
            raise ValueError(
                "require_forward_param_sync=False is not supported, because buffers come with each "
                "average: forward_sync_buffers=False, on every rank, sends none"
            )

    @property
    def broadcast_bucket_size(self) -> int:
        """The bytes of a message in which construction sends parameters and buffers."""
        return MESSAGE_BYTES

    @property
    def forward_sync_buffers(self) -> bool:
        """True if forward passes find rank 0's buffers. May be set, on every rank."""
        return self.reducer.buffer_sync.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._settings["sync_buffers"] = value
        self.reducer.set_sync_buffers(value)

    broadcast_buffers = forward_sync_buffers  # torch's older name

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that take part."""
        return check_group(self._group)

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        # Holds no reference to the default group: gloo's threads must end when a program closes it.
        self._group = None if group is dist.group.WORLD else group

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates local gradients if forward or backward, or both, run inside.

        The next backward pass outside the context, after a forward pass outside, averages the sum.
        Raises a RuntimeError if a later wrapper or Reducer of the same module has replaced this.
        """
        check_current(self.reducer.core)
        before = self._forward_sync.required
        self._forward_sync.set_required(False)
        try:
            yield
        finally:
            self._forward_sync.set_required(before)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Calls `Reducer.register_comm_hook`; the hook has torch's signature."""
        with self.logger.errors():
            self.reducer.register_comm_hook(state, hook)
        self._comm_hook = state, hook

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        grad_scaler: torch.amp.GradScaler | Sequence[torch.amp.GradScaler] | None = None,
    ) -> AbstractContextManager[Any]:
        """Opens a context like `ddp.join`."""
        check_current(self.reducer.core)
        options = {
            "divide_by_initial_world_size": divide_by_initial_world_size,
            "grad_scaler": grad_scaler,
        }
        return Join([self], enable, throw_on_early_termination, **options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for a rank without data; called by torch's `Join`."""
        return self._joinable.join_hook(**kwargs)

    join_device: Any = property(
        attrgetter("_joinable.join_device"), doc="The device of the tensors that ranks exchange."
    )
    join_process_group: Any = property(
        attrgetter("_joinable.join_process_group"), doc="The ranks that take part."
    )
    _authoritative_rank: Any = property(attrgetter("_joinable.last_rank"))

    @property
    def _join_config(self) -> Any:
        return self._joinable._join_config

    @_join_config.setter
    def _join_config(self, value: Any) -> None:
        # Joinable's own __init__ sets it before `_joinable` exists.
        if "_joinable" in self.__dict__:
            self._joinable._join_config = value
            self.reducer.core.joining = value.enable

    # Private in torch, but used by programs ------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        data = self.logger._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Returns None: dynamo need not split graphs where torch's buckets would end."""

    # True if the buckets have their final layout.
    _has_rebuilt_buckets: Any = property(lambda self: self.reducer.ready_order is not None)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        allreduce, fp16 = comm_hooks.allreduce_hook, comm_hooks.fp16_compress_hook
        hooks = {"ALLREDUCE": allreduce, "FP16_COMPRESS": fp16}
        self.register_comm_hook(self._group, hooks[comm_hook_type.name])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepts only False: outputs here are always the module's own."""
        if val:
            raise ValueError("outputs are never cloned here")

    def _set_static_graph(self) -> None:
        """Declares the graph static. Every rank must call it, before the first forward pass."""
        if self.static_graph:
            return
        if self._forward_sync.has_begun or self.reducer.iteration:
            with self.logger.errors():
                raise RuntimeError(
                    "_set_static_graph() should be called before training loop starts, and a "
                    "forward pass has run: pass static_graph=True to the constructor"
                )
        self._settings["static_graph"] = self.static_graph = True
        self.reducer.set_static_graph()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Switches to another group, whose ranks hold the same parameters; a no-op outside of it.

        A new Reducer rebuilds the buckets. A comm hook keeps its state; if the state names
        another group, the program must change it.
        """
        if dist.get_rank(new_process_group) < 0:
            return
        if current_pass() != -1:
            raise RuntimeError("_update_process_group() was called during backward: call it after")
        try:
            self.reducer.check_complete()
        except RuntimeError:  # the last backward pass has failed, perhaps because a rank was lost
            self.reducer.abort_step()
        old, self.process_group = self._group, new_process_group
        self._finalizer()  # removes the old Reducer's hooks, so each gradient is averaged once
        self._build(WrappedReducer)
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            # The state of hooks in `comm_hooks` is the process group.
            self.reducer.register_comm_hook(self._group if state is old else state, hook)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: Any, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Marks parameters and buffers to ignore; called before `module` is wrapped."""
        module._ddp_params_and_buffers_to_ignore = check_names(params_and_buffers_to_ignore)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # torch's mark, for `_get_data_parallel_params`

    @staticmethod
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    # Copies -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be copied, but a copy finds the default group.
        if self._group is not None:
            raise RuntimeError("only a wrapper on the default process group can be copied")
        state = self.__dict__.copy()
        state["_comm_hook"] = None
        # A copy makes its own in `_build`, because they hold the process group and hooks.
        for name in ("_group", "reducer", "_forward_sync", "logger", "_joinable", "_finalizer"):
            del state[name]
        # `__setstate__` registers `_add_prefix` again.
        state["_load_state_dict_pre_hooks"] = type(self._load_state_dict_pre_hooks)()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self.process_group = check_group(None)
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.logger = Logger(self)
        self._build(internals.CopiedReducer)


# `isinstance` checks for torch's class pass (in Lightning, accelerate, pipelines, distributed
# checkpoints), but no code is inherited.
torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)


def _add_prefix(_module: object, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    inside = [key for key in state_dict if key.startswith(prefix)]
    # A bare module's state, which may be loaded too, has keys without `module.`.
    if not any(key.startswith(f"{prefix}module.") for key in inside):
        for key in inside:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
