"""Exercises of chapter 17: accumulation that is right, and what it saves.

python -m pytest tutorial/17_accumulate
"""


def bytes_sent(gradients, parts, steps, sync_every_pass):
    """Returns the bytes of all all-reduces in so many steps, each of `parts` backward passes.

    `gradients` is the size of the model's gradients, in bytes.
    """
    raise NotImplementedError("bytes_sent: how many passes of a step send their gradients?")


def accumulate(model, parallel, loss_of, parts):
    """Leaves in `.grad` the mean gradient over all examples of this rank's parts and of all ranks.

    `loss_of(model, part)` is the mean loss over the examples of a part, `len(part)` of them. Parts
    may have different sizes; all ranks have parts of the same number and sizes. `.grad` is None at
    the beginning. `parallel` is an `Accumulating` of accumulate.py: send each gradient once.
    """
    raise NotImplementedError("accumulate: weight losses, no_sync for all passes but the last")
