"""Exercises of chapter 21: memory, predicted, and a layer that is gathered in 16 bits.

python -m pytest tutorial/21_shard_it
"""


def predict_memory(counts, nproc):
    """Predicts the bytes that a rank holds at most, in shard_it.py with Adam.

    `counts` are the numbers of parameters of the layers, in order; `nproc` divides each. Returns a
    dict with the keys "shards", "their gradients", "state" and "whole layers". Numbers have 4
    bytes. For each shard, Adam's state is two numbers for each of its parameters, and 4 bytes more,
    which count its steps. "Whole layers" is the largest sum, at any one time, of the whole
    parameters and the whole gradients that are there.
    """
    raise NotImplementedError("predict_memory: which layers are whole in forward, and in backward?")


def gather_in_16_bits(shard):
    """Returns a layer's whole parameters in float32, gathered with half the bytes.

    `shard` is this rank's part, a flat tensor in float32, of equal size on all ranks. Each rank
    sends its part in bfloat16, and all ranks must return the same numbers, also for their own part.
    """
    raise NotImplementedError("gather_in_16_bits: dist.all_gather_into_tensor in torch.bfloat16")
