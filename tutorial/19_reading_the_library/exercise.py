"""Exercises of chapter 19: comm hooks, for this library and for torch's.

python -m pytest tutorial/19_reading_the_library

None of them waits: backward continues while the bucket is in flight. You may change
`bucket.buffer()`.
"""


def average(state, bucket):
    """Returns a future of the bucket's average over ranks: divides, then all-reduces.

    Its value is one tensor, so use `then` to take it out of the list that the all-reduce gives.
    """
    raise NotImplementedError("average: divide, all_reduce with async_op, get_future, then")


def half(state, bucket):
    """Returns a future of the average; sends only 16 bits for each number.

    Send a float16 copy of the divided gradients. Copy what arrives back into the buffer,
    which is the future's value.
    """
    raise NotImplementedError("half: as average, but send buffer.half(), and copy it back")


def counted(state, bucket):
    """Averages, and counts: adds the bytes of the buffer to state["bytes"].

    A hook can call another hook. `state` is what the program has registered with the hook.
    """
    raise NotImplementedError("counted: count buffer.nbytes, then call average")
