"""Exercises of chapter 12: SGD with momentum, with one copy of the momentum for each machine.

python -m pytest tutorial/12_one_copy
"""


def make_momentum(rank, nproc, parameters):
    """Returns this rank's momentum: a zero for each parameter that this rank steps.

    `parameters` is the flat tensor of all parameters. A rank needs only the momentum of its own
    chunk (chapter 10's `chunk`), so all ranks together have one copy.
    """
    raise NotImplementedError("make_momentum: zeros for this rank's chunk alone")


def step(parameters, rows, momentum, rank, rate, factor, meet):
    """Takes one step of SGD with momentum, on this rank's chunk, as `torch.optim.SGD` does.

    All ranks share `parameters`, and row r of `rows` holds rank r's gradients; this rank's row
    must be zero at the end. With g the mean of the gradients, the new momentum is
    `factor * momentum + g`, and the parameters change by `-rate * momentum`.
    """
    raise NotImplementedError("step: meet, mean, momentum, parameters, meet, zero your row")
