"""Exercises of chapter 6: one order of launch for all ranks.

python -m pytest tutorial/06_overlap
"""


def first_mismatch(orders):
    """Returns the place of the first launch at which the ranks do not launch the same tensor.

    `orders[rank]` lists the names of the tensors in the order in which that rank launches them.
    The n-th launch of one rank meets the n-th launch of the others, whatever is in it. Returns None
    if all launches fit. If one rank launches less than another, the first one that is missing is
    a mismatch, too: the others wait for it for ever.
    """
    raise NotImplementedError("first_mismatch: compare the ranks' orders, place by place")


class AgreedOrder:
    """Decides which gradients to launch, so that all ranks launch 0, 1, 2, ... in this order.

    On each rank gradients become ready in an order of its own. One that is ready too early has to
    wait until all before it are launched.
    """

    def __init__(self):
        """Begins with nothing ready and nothing launched."""
        raise NotImplementedError("AgreedOrder: keep what is ready, and the number to launch next")

    def ready(self, number):
        """Notes that gradient `number` is ready; returns the list of numbers to launch now."""
        raise NotImplementedError("ready: [] if one before is missing; else it and what it frees")
