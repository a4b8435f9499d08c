"""Exercises of chapter 6: one order of launch for all ranks.

python -m pytest tutorial/06_overlap
"""


def first_mismatch(orders):
    """Returns the place of the first launch at which the ranks do not launch the same tensor.

    `orders[rank]` lists the names of the tensors in the order in which that rank launches them.
    The n-th launch of one rank meets the n-th launch of the others, whatever is in it. Returns None
    if all launches match. If one rank launches less than another, the first missing launch is
    a mismatch, too: the others wait for it forever.
    """
    raise NotImplementedError("first_mismatch: compare the ranks' orders, place by place")


class AgreedOrder:
    """Decides which gradients to launch, so that all ranks launch 0, 1, 2, ... in this order.

    Each rank's gradients become ready in a different order. A gradient that is ready too early
    waits until all gradients before it are launched.
    """

    def __init__(self):
        """Starts with nothing ready and nothing launched."""
        raise NotImplementedError("AgreedOrder: keep what is ready, and the number to launch next")

    def ready(self, number):
        """Notes that gradient `number` is ready; returns the list of numbers to launch now."""
        raise NotImplementedError("ready: [] if one before is missing; else it and what it frees")
