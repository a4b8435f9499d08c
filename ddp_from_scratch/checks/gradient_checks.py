"""What must not pass in silence: checks before a forward pass and before an optimizer's step."""

from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_from_scratch.autograd.backward_pass import BackwardPass
from ddp_from_scratch.autograd.used_parameters import Usage
from ddp_from_scratch.buckets.bucket import Bucket
from ddp_from_scratch.buckets.bucket_list import Buckets
from ddp_from_scratch.checks.module_snapshot import AGAIN, Snapshot
from ddp_from_scratch.sync.gradient_weight import Share


class Guard:
    """Raises where gradients would not be averaged, or not be averages; names parameter and rank.

    Args:
        module: whose forward passes are checked.
        snapshot: its parameters as they were.
        usage: which of them may be unused; knows this rank.
        buckets: where their gradients are.
        backward: the pass that fills the buckets.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        snapshot: Snapshot,
        usage: Usage,
        buckets: Buckets,
        backward: BackwardPass,
    ) -> None:
        self._module, self._snapshot, self._usage = module, snapshot, usage
        self._buckets, self._backward, self._rank = buckets, backward, usage.rank

    def check_forward(self) -> None:
        """Raises if the forward pass that begins, one of training, would not be averaged right."""
        if trains(self._module):
            self._snapshot.check(self._module, self._usage.varies, self._rank)
            self.check_complete()

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        if self._backward.begun and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"an optimizer stepped during backward on rank {self._rank}, on gradients that are "
                f"not averaged yet: let it step when backward() has returned"
            )
        if self._backward.begun or self._buckets[-1].launched:
            raise RuntimeError(
                f"the last backward pass on rank {self._rank} was broken off: {AGAIN}"
            )
        if any(bucket.begun for bucket in self._buckets):
            raise RuntimeError(
                f"no gradient in the last backward pass on rank {self._rank} for: "
                f"{_shortened(self._buckets.missing())}. Every parameter must take part in the "
                f"loss on every rank, unless the Reducer has find_unused_parameters=True"
            )

    def unequal_weights(self, share: Share) -> RuntimeError | None:
        """Synchronised batch norm mixes gradients before they are weighed. Collective there."""
        if not self.has_sync_batch_norm() or share.all_equal():
            return None
        return RuntimeError(
            "the weights of ranks differ, and the module has synchronised batch norm, which mixes "
            "the gradients of all ranks before they are weighed: leave weight() out, and multiply "
            "each rank's loss by its amount x world size / the sum of all amounts"
        )

    def has_sync_batch_norm(self) -> bool:
        """Whether a layer that trains takes its moments over several ranks."""
        # Not as of the snapshot: layers may have been converted since.
        return any(
            isinstance(layer, _BatchNorm) and hasattr(layer, "process_group") and layer.training
            for layer in self._module.modules()
        )

    def check_static(self, differences: Sequence[tuple[int, int, int]]) -> None:
        """Raises if a backward pass was not as the first one."""
        if differences:
            names = self._buckets.names
            told = [f"{names[i]} {now} instead of {then}" for i, now, then in differences]
            raise RuntimeError(
                f"static_graph=True, but this backward pass on rank {self._rank} gave other "
                f"numbers of gradients than the first: {_shortened(told)}"
            )

    def second_gradient(self, index: int) -> RuntimeError:
        """A gradient came when its bucket was under way: the average would overwrite it."""
        return RuntimeError(
            f"parameter {self._buckets.names[index]} got a second gradient on rank {self._rank} "
            f"while the first was being averaged. Accumulate several backward passes under "
            f"no_sync(), all but the last; where one pass gives it several gradients, or it is "
            f"used outside of the module's forward, use static_graph=True"
        )

    def written_late(self, names: list[str]) -> RuntimeError:
        """A forward pass wrote to parameters, as none did before the first average."""
        return RuntimeError(
            f"a forward pass on rank {self._rank} has written to {_shortened(names)}, which other "
            f"ranks may not have: write to parameters after the step, alike on every rank; or let "
            f"the Reducer compare ranks, with check_every=N"
        )

    def check_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Raises if its bucket cannot hold this gradient."""
        name, flat = self._buckets.names[index], isinstance(self._buckets.of(index), Bucket)
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
    """Whether the forward pass that begins is one of training, which all ranks take part in.

    An evaluation is one rank's own affair; recomputing, for activation checkpointing, is part of
    backward. Reentrant checkpointing of the whole module runs it without gradients first.
    """
    recomputing = torch._C._current_graph_task_id() != -1
    return not recomputing and (torch.is_grad_enabled() or module.training)


def _shortened(told: list[str]) -> str:
    more = f" and {len(told) - 10} more" if len(told) > 10 else ""
    return ", ".join(told[:10]) + more
