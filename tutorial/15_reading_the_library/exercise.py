"""Exercises of chapter 15: comm hooks, for this library and for torch's.

python -m pytest tutorial/15_reading_the_library

None of them waits: backward goes on while the bucket travels. `bucket.buffer()` may be changed.
"""


def average(state, bucket):
    """Returns a future of the bucket's average over ranks: divides, then all-reduces.

    Its value is one tensor, so the list that the all-reduce gives has to be opened with `then`.
    """
    raise NotImplementedError("average: divide, all_reduce with async_op, get_future, then")


def half(state, bucket):
    """Returns a future of the average, for which only 16 bits are sent for each number.

    A float16 copy of the divided gradients travels. What arrives is copied back into the buffer,
    which is the future's value.
    """
    raise NotImplementedError("half: as average, but send buffer.half(), and copy it back")


def counted(state, bucket):
    """Averages, and counts: adds the bytes of the buffer to state["bytes"].

    A hook can be made of another one. `state` is what the program has registered with the hook.
    """
    raise NotImplementedError("counted: count buffer.nbytes, then call average")
