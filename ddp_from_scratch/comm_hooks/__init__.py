"""Comm hooks: each averages one bucket over the ranks and returns a future of the average.

    reducer.register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)

The signature is that of torch's DDP, so hooks written for DDP run here unchanged, also those in
`torch.distributed.algorithms.ddp_comm_hooks`:

    hook(state, bucket) -> Future[Tensor]

`state` is the object registered with the hook. For the hooks here it is the process group (None
means all ranks). `bucket` offers the methods of torch's `dist.GradBucket`. The future's value is
the averaged flat tensor, of any floating dtype, or a list that holds only that tensor.
"""

from ddp_from_scratch.comm_hooks import power_sgd
from ddp_from_scratch.comm_hooks.default_hooks import (
    allreduce_hook,
    average,
    bf16_compress_hook,
    fp16_compress_hook,
    is_ours,
    keep_local,
    may_overlap,
    while_packing,
)

__all__ = [
    "allreduce_hook",
    "average",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "is_ours",
    "keep_local",
    "may_overlap",
    "power_sgd",
    "while_packing",
]
