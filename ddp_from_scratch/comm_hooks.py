"""What a bucket sends: step 5 of a gradient's way.

A comm hook takes a bucket's flat buffer, starts its reduction over the ranks in place, and
returns the handle.
"""

import torch
import torch.distributed as dist


def average(buffer: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> dist.Work:
    """All-reduces `buffer` to its average over ranks, in full precision.

    This is the only place where gradients are divided. The division comes before the sum, as in
    torch's DDP: n summands of 1/n each cannot overflow a 16-bit float where the average would
    not, and the result has the same bits as torch's.

    Args:
        buffer: flat tensor of any dtype that the backend sums; holds the average after the
            handle's `wait()`.
        process_group: the ranks that take part; None means all.
    """
    buffer.mul_(1.0 / dist.get_world_size(process_group))
    handle = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert handle is not None, "this rank is not a member of the process group"
    return handle
