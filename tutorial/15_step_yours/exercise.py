"""Exercises of chapter 15: memory, predicted, and a clipped step of a rank's own share.

python -m pytest tutorial/15_step_yours
"""


def predict_memory(count, nproc):
    """Predicts the bytes that a rank holds with Adam, if it steps its own share of the parameters.

    Returns a dict with the keys "parameters", "gradients" and "state". The model has `count`
    parameters of 4 bytes, and `nproc` divides `count`. Adam's state is two numbers for each
    parameter that it steps, and 4 bytes more, which count its steps.
    """
    raise NotImplementedError("predict_memory: which of the three is divided among the ranks?")


def step(parameters, gradients, optimizer, limit):
    """Takes a step of this rank's share, with gradients clipped to the length `limit`.

    `parameters` and `gradients` are flat, and the number of ranks divides their size. This rank's
    share, `parameters.chunk(nproc)[rank]`, is all that `optimizer` steps; its `.grad` is this
    rank's chunk of `gradients`. At the end all ranks have all new parameters.

    Gradients whose length exceeds `limit` are multiplied by limit / length. The length is that of
    the *whole* mean gradient, of which a rank has a share alone: the square root of a sum of
    squares, which all ranks add up.
    """
    raise NotImplementedError("step: reduce-scatter, mean, sum of squares, clip, step, all-gather")
