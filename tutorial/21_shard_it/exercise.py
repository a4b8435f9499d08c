"""Exercises of chapter 21: memory, predicted, and a layer that is gathered in 16 bits.

python -m pytest tutorial/21_shard_it
"""


def predict_memory(counts, nproc):
    """Predicts the bytes that a rank holds at most, in shard_it.py with Adam.

    `counts` are the numbers of parameters of the layers, in order; `nproc` divides each. Returns a
    dict with the keys "shards", "their gradients", "state" and "whole". Numbers have 4 bytes. For
    each shard, Adam's state is two numbers for each of its parameters, and 4 bytes more, which
    count its steps. "whole" is the largest sum, at any one time, of the whole parameters and the
    whole gradients that are there, also of those on their way. Layers are prefetched.
    """
    raise NotImplementedError("predict_memory: what is whole when a layer has its gradients?")


def gather_in_16_bits(shard):
    """Returns a layer's whole parameters in float32, gathered with half the bytes.

    `shard` is this rank's part, a flat Parameter in float32, of equal size on all ranks. Each rank
    sends its part in bfloat16, with one call of `dist.all_gather_into_tensor`. All ranks must
    return the same numbers, also for their own part.
    """
    raise NotImplementedError("gather_in_16_bits: dist.all_gather_into_tensor in torch.bfloat16")
