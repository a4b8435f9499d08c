"""Exercises of chapter 3: two collectives, from dist.send, dist.isend and dist.recv.

python -m pytest tutorial/03_all_reduce
"""


def tree_broadcast(tensor, root):
    """Copies rank `root`'s tensor into every other rank's `tensor`, in place.

    If `root` sent to all others one after another, 8 ranks would take 7 rounds. Here, every rank
    with the numbers sends them, so each round doubles the number of ranks that have them. 8 ranks
    take 3 rounds, and no rank sends more than 3 times. Every rank but `root` receives
    once. The number of ranks need not be a power of two.

    Count ranks from the root: `place = (rank - root) % nproc`. In the round of distance 1, place 0
    sends to place 1; in that of distance 2, places 0 and 1 send to 2 and 3; then 4, and so on.
    """
    raise NotImplementedError("tree_broadcast: in the round of distance d, place p sends to p + d")


def reduce_scatter(tensor):
    """Returns chunk number `rank` of the sum over all ranks, and may change `tensor`.

    The chunks are `tensor.tensor_split(nproc)`. This is the first half of ring.py, with another
    start: there rank r ends with chunk r + 1, here with chunk r. A rank sends nproc - 1 chunks.
    """
    raise NotImplementedError("reduce_scatter: the first nproc - 1 steps of the ring, shifted by 1")
