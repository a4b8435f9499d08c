"""What `Reducer.stats()` returns and `print(reducer)` shows."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.options.unused import Unused


@dataclass(frozen=True)
class ReducerStats:
    """Settings and buckets of a `Reducer`."""

    bucket_bytes: tuple[int, ...]  # in launch order
    bucket_cap_bytes: int  # the largest cap
    parameters: int
    parameter_bytes: int
    iteration: int  # the number of averages so far
    rebuilt: bool  # the buckets are in the order in which gradients became ready
    overlap: bool
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool
    comm_hook: str
    reduce: str  # "mean" or "sum"
    hook_per_bucket: bool  # autograd calls only for each bucket's last gradient
    transport: str  # "shared memory" if a machine's ranks reduce there, else the backend's name
    compiled: bool  # by torch.compile, as a whole: all gradients arrive at the end of backward

    @staticmethod
    def of(reducer: CoreReducer, backend: str) -> "ReducerStats":
        unused, hooks = reducer.observer(Unused), reducer.hooks
        comm = reducer.comm
        # A user's comm hook sends through the group that it names, usually the Reducer's.
        group = comm.last_group() if comm.through_group() else reducer.process_group
        shared = traits(group or dist.group.WORLD).shares_memory
        return ReducerStats(
            bucket_bytes=tuple(
                sum(p.nbytes for p in bucket.parameters()) for bucket in reducer.all_buckets
            ),
            bucket_cap_bytes=max(reducer.caps),
            parameters=len(reducer.parameters),
            parameter_bytes=sum(parameter.nbytes for parameter in reducer.parameters),
            iteration=reducer.iteration,
            rebuilt=reducer.ready_order is not None,
            overlap=reducer.overlap,
            gradient_as_bucket_view=bool(reducer.view_buckets),
            find_unused_parameters=unused is not None and unused.varies,
            static_graph=unused is not None and unused.is_static,
            comm_hook=getattr(comm.hook, "__qualname__", str(comm.hook)),
            reduce="sum" if comm.sums else "mean",
            hook_per_bucket=hooks is not None and hooks.per_bucket,
            transport="shared memory" if shared else backend,
            compiled=_is_compiled(reducer.module),
        )

    def __str__(self) -> str:
        sizes = self.bucket_bytes
        shown = ", ".join(f"{size / 2**20:.3g}" for size in sizes[:8])
        noun = "bucket" if len(sizes) == 1 else "buckets"
        more = ", ..." if len(sizes) > 8 else ""
        switches = {
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "a hook per bucket": self.hook_per_bucket,
            'reduce="sum"': self.reduce == "sum",
        }
        on = "".join(f", {name}" for name, is_on in switches.items() if is_on)
        end = ", compiled as a whole: gradients arrive at the end of backward" * self.compiled
        return (
            f"{self.parameters} parameters in {len(sizes)} {noun} of {shown}{more} MiB, "
            f"overlap={self.overlap}, comm_hook={self.comm_hook}{on}, via {self.transport}{end}"
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    """True if torch.compile runs the whole module, so its backward pass is a single function."""
    # `torch.compile(module)` returns a module of another class; `module.compile()` sets a function.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    by_class = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return by_class or module._compiled_call_impl is not None
