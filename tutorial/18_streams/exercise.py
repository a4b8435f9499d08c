"""Exercises of chapter 18: when a step ends, and a read that comes too early.

python -m pytest tutorial/18_streams
"""


def end_of_overlap(backward, send):
    """Returns when the last sum of a step is complete, if each is launched in its hook.

    `backward[n]` is how long layer n's backward takes, in the order in which they run, and
    `send[n]` how long the sum of its gradient takes. Queueing takes no time. The sums run on one
    stream, one after the other, and each after its layer's backward.
    """
    raise NotImplementedError("end_of_overlap: two streams' ends, layer by layer")


def races(operations):
    """Returns the names of the tensors that one stream touches before the other is done with them.

    `operations` is what a host queues on two streams, "compute" and "nccl", in this order:

        ("run", stream, tensor)      an operation that reads and writes this tensor
        ("record", stream, event)    the event is complete after all that the stream has so far
        ("wait", stream, event)      what the stream gets from now on comes after the event

    An operation races if the other stream has touched the tensor before, and no event that this
    stream has waited for was recorded after that. (Waits through a third stream do not occur.)
    Return each name once, in the order in which the races are found.
    """
    raise NotImplementedError("races: number the operations of a stream; events and waits hold one")
