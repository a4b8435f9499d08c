"""Solutions of chapter 21."""

import torch
import torch.distributed as dist


def predict_memory(counts, nproc):
    """Predicts the bytes that a rank holds at most, in shard_it.py with Adam."""
    parts = 4 * sum(counts) // nproc
    sizes = [4 * count for count in counts]
    # In forward: a layer, and the next one on its way. In backward: a layer with its gradients, and
    # the one before it on its way.
    pairs = list(zip(sizes, [*sizes[1:], 0], strict=True))
    forward = max(this + following for this, following in pairs)
    backward = max(before + 2 * this for before, this in zip([0, *sizes], sizes, strict=False))
    return {
        "shards": parts,
        "their gradients": parts,
        "state": 2 * parts + 4 * len(counts),
        "whole layers": max(forward, backward),
    }


def gather_in_16_bits(shard):
    """Returns a layer's whole parameters in float32, gathered with half the bytes."""
    whole = torch.empty(dist.get_world_size() * len(shard), dtype=torch.bfloat16)
    dist.all_gather_into_tensor(whole, shard.bfloat16())
    return whole.float()
