"""Averages some gradients at a chosen moment of backward, apart from the Reducer's buckets."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_from_scratch.buckets.bucket_list import make_buckets
from ddp_from_scratch.buckets.gradient_bucket import LaunchArgs
from ddp_from_scratch.comm_hooks import default_hooks


class DelayedReduction:
    """Averages the gradients of some parameters when the gradient of a chosen one is ready.

    For gradients that are complete before the rest of backward, such as those of embeddings that a
    pipeline computes in several parts. They must be complete by then.

    Args:
        parameters: the parameters to average; one bucket for each dtype and device.
        trigger: backward's gradient for this parameter starts the all-reduce.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        trigger: torch.nn.Parameter,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.process_group = process_group
        # A cap that nothing reaches: all gradients are launched at the same moment anyway.
        self._buckets = make_buckets(parameters, range(len(parameters)), [2**62], True)
        self.hook = trigger.register_hook(self._launch)

    def _launch(self, gradient: torch.Tensor) -> None:
        for bucket in self._buckets:
            for index in bucket.layout.members:
                # No hook counts these gradients. A member marked unused contributes its `.grad`.
                bucket.mark_unused(index)
            bucket.launch(LaunchArgs(default_hooks.average, self.process_group))
        # Waiting here would hold up the rest of backward.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for bucket in self._buckets:
            bucket.finish()
