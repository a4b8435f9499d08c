"""Exercise of chapter 7: buckets in the order in which gradients really become ready.

python -m pytest tutorial/07_buckets
"""

from importlib import import_module

# An import statement cannot contain a name that begins with a digit.
buckets = import_module("tutorial.07_buckets.buckets")


def agree(order):
    """Returns rank 0's order, on every rank.

    `order` lists the parameters' numbers in the order of this rank's hooks in its first backward.
    It has the same numbers on all ranks, maybe in a different order.
    """
    raise NotImplementedError("agree: broadcast rank 0's order, as a tensor of integers")


def rebuild(parallel, parameters, order, cap):
    """Replaces the buckets of a `DataParallel` of buckets.py, after its first step.

    `parameters` are the model's, in its own order; `order` says which of them become ready first,
    by their numbers; `cap` is in bytes. Look at what DataParallel.__init__ makes of its parameters.
    """
    raise NotImplementedError("rebuild: buckets.assign parameters in this order; then bucket_of")
