"""Checks before a forward pass, a launch and an optimizer step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_from_scratch.autograd.backward_pass import BackwardPass, PassState
from ddp_from_scratch.buckets.bucket_list import BucketList
from ddp_from_scratch.buckets.gradient_bucket import BucketState
from ddp_from_scratch.checks.module_snapshot import (
    AGAIN,
    ForwardWrites,
    ModuleSnapshot,
    check_rescaling,
)
from ddp_from_scratch.group import on_gpu_of
from ddp_from_scratch.sync.gradient_weight import GradientWeight


class GradientChecks:
    """Raises if averages would be missing or wrong; names the parameter and the rank.

    Raises:
        ValueError: the module has a layer that is known to write to parameters in forward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        snapshot: ModuleSnapshot,
        backward: BackwardPass,
        buckets: BucketList,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._module, self._snapshot, self._backward = module, snapshot, backward
        self._buckets, self._process_group = buckets, process_group
        self._rank = dist.get_rank(process_group)
        # None with one rank, which cannot differ from others.
        self._writes: ForwardWrites | None = None
        if dist.get_world_size(process_group) > 1:
            check_rescaling(module, snapshot.parameters)
            self._writes = ForwardWrites(snapshot.parameters)

    def before_forward(self) -> None:
        """Raises, in training, if averages after this forward pass would be missing or wrong.

        Records the parameters' versions.
        """
        training = trains(self._module)
        if training:
            difference = self._snapshot.difference(self._module, self._backward.varies)
            if difference is not None:
                raise RuntimeError(
                    f"{difference} on rank {self._rank} after the Reducer was made: {AGAIN}"
                )
            self.check_complete()
        if self._writes is not None:
            self._writes.on_enter(training)

    def after_forward(self, compared: bool) -> None:
        """Raises if forward has written to parameters and ranks will not be compared.

        Args:
            compared: True if the first average is still to come, or ranks are compared regularly.
        """
        written = self._writes.on_exit() if self._writes is not None else []
        # Writes before the first average make the Reducer compare ranks. Later ones would not.
        if written and not compared:
            raise RuntimeError(
                f"a forward pass on rank {self._rank} has written to {shortened(written)}, which "
                f"other ranks may not have: write to parameters after the step, alike on every "
                f"rank; or let the Reducer compare ranks, with check_every=N"
            )

    def any_written(self) -> bool:
        """True if a forward pass has written to parameters on any rank. Collective."""
        with on_gpu_of(self._module):
            return self._writes is not None and self._writes.on_any_rank(self._process_group)

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        is_idle = self._backward.state is PassState.IDLE
        if not is_idle and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"an optimizer stepped during backward on rank {self._rank}, on gradients that are "
                f"not averaged yet: let it step when backward() has returned"
            )
        # The last bucket is unpacked last: if it is not FILLING, an exception has ended `finish`
        # before the end.
        if not is_idle or self._buckets.all[-1].state is not BucketState.FILLING:
            raise RuntimeError(
                f"the last backward pass on rank {self._rank} was broken off: {AGAIN}"
            )
        if any(bucket.begun for bucket in self._buckets.all):
            raise RuntimeError(
                f"no gradient in the last backward pass on rank {self._rank} for: "
                f"{shortened(self._buckets.missing())}. Every parameter must take part in the "
                f"loss on every rank, unless the Reducer has find_unused_parameters=True"
            )

    def check_weight(self, weight: GradientWeight) -> None:
        """Raises if ranks' weights differ and there is synchronised batch norm. Collective then."""
        # Synchronised batch norm mixes gradients of all ranks before the Reducer multiplies by
        # weights.
        if self.has_sync_batch_norm() and not weight.all_equal():
            raise RuntimeError(
                "the weights of ranks differ, and the module has synchronised batch norm, which "
                "mixes the gradients of all ranks before they are weighed: leave weight() out, and "
                "multiply each rank's loss by its amount x world size / the sum of all amounts"
            )

    def layers_communicate(self) -> bool:
        """True if layers have collectives in the Reducer's own group."""
        ours = self._process_group or dist.group.WORLD
        found = (layer.process_group or dist.group.WORLD for layer in self._snapshot.communicating)
        return any(group is ours for group in found)

    def has_sync_batch_norm(self) -> bool:
        """True if a layer in training takes its moments over several ranks."""
        return bool(self.sync_batch_norms())

    def sync_batch_norms(self) -> list[_BatchNorm]:
        """The layers in training that take their moments over several ranks."""
        # Looks at the module, not at the snapshot: layers may have been converted since.
        return [
            layer
            for layer in self._module.modules()
            if isinstance(layer, _BatchNorm) and hasattr(layer, "process_group") and layer.training
        ]

    def static_error(self, differences: Sequence[tuple[int, int, int]]) -> RuntimeError | None:
        """Returns an error if the backward pass differs from the first one."""
        if not differences:
            return None
        names = self._buckets.names
        counts = [f"{names[i]} {now} instead of {then}" for i, now, then in differences]
        return RuntimeError(
            f"static_graph=True, but this backward pass on rank {self._rank} gave other "
            f"numbers of gradients than the first: {shortened(counts)}"
        )

    def second_gradient(self, index: int) -> RuntimeError:
        """Returns the error for a gradient after the launch, which the average would overwrite."""
        return RuntimeError(
            f"parameter {self._buckets.names[index]} got a second gradient on rank {self._rank} "
            f"while the first was being averaged. Accumulate several backward passes under "
            f"no_sync(), all but the last; where one pass gives it several gradients, or it is "
            f"used outside of the module's forward, use static_graph=True"
        )

    def check_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Raises if its bucket cannot hold this gradient."""
        name, flat = self._buckets.names[index], not self._buckets.bucket_of[index].is_sparse
        if gradient.is_sparse and flat:
            raise RuntimeError(
                f"the gradient of parameter {name} is sparse on rank {self._rank}, but its module "
                f"has not declared that: only the weights of Embedding and EmbeddingBag with "
                f"sparse=True are gathered, others lie in flat buckets"
            )
        if gradient.requires_grad and (self._buckets.gradient_as_bucket_view or not flat):
            why = "a window of a bucket: use gradient_as_bucket_view=False" if flat else "sparse"
            raise RuntimeError(
                f"backward(create_graph=True) on rank {self._rank}: the gradient of parameter "
                f"{name} cannot keep its graph, since it is {why}"
            )


def trains(module: torch.nn.Module) -> bool:
    """True if a forward pass of training begins, in which all ranks take part."""
    # Recomputing a forward pass, for activation checkpointing, is part of backward.
    recomputing = torch._C._current_graph_task_id() != -1
    # One rank alone may evaluate. But a module in training mode without gradients may be inside a
    # reentrant checkpoint, which runs its forward pass without them first.
    return not recomputing and (torch.is_grad_enabled() or module.training)


def shortened(names: Sequence[str], most: int = 10) -> str:
    """Joins at most so many names, and says how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
