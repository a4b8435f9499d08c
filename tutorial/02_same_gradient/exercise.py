"""Exercises of chapter 2: shards of unequal size.

python -m pytest tutorial/02_same_gradient
"""


def weighted_mean(gradients, sizes):
    """Returns the gradient of the whole batch.

    `gradients[i]` is the gradient of the mean loss over shard i, which has `sizes[i]` examples.
    """
    raise NotImplementedError("weighted_mean: weight each gradient by its part of the batch")


def loss_factor(size, sizes):
    """Returns the factor by which the process with `size` examples multiplies its loss.

    Afterwards the *plain* mean of the processes' gradients, sum / number of processes, must be the
    gradient of the whole batch. `sizes` lists the processes' numbers of examples.
    """
    raise NotImplementedError("loss_factor: a number that is 1 where all sizes are equal")
