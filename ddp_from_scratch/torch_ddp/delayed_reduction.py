"""Gradients that are averaged when the gradient of one chosen parameter is ready."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.bucket_list import make_buckets
from ddp_from_scratch.buckets.gradient_bucket import LaunchArgs
from ddp_from_scratch.comm_hooks import default_hooks


class DelayedReduction:
    """Averages the gradients of some parameters when a chosen one is ready.

    For gradients that are complete before the rest of backward is: those of embeddings that a
    pipeline computes in several parts, for example. They have to be complete by then.

    Args:
        parameters: whose gradients are averaged; one bucket for each dtype and device.
        trigger: their all-reduce begins when backward has computed its gradient.
        process_group: the ranks that take part.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        trigger: torch.nn.Parameter,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.process_group = process_group
        self._buckets = make_buckets(parameters, range(len(parameters)), [2**62], True)
        self.hook = trigger.register_hook(self._launch)

    def _launch(self, gradient: torch.Tensor) -> None:
        for bucket in self._buckets:
            for index in bucket.layout.members:
                bucket.mark_unused(index)  # it contributes what `.grad` holds
            bucket.launch(LaunchArgs(default_hooks.average, self.process_group))
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for bucket in self._buckets:
            bucket.finish()
