"""Exercises of chapter 1: memory, predicted with arithmetic alone.

The model has Linear layers with bias, and a ReLU after each. `widths` are its sizes:
`(784, 128, 10)` has two layers, from 784 numbers to 128 and from 128 to 10. All are float32.

    python -m pytest tutorial/01_one_process
"""


def predict_memory(widths, batch):
    """Predicts the bytes of a training step with torch.optim.SGD and momentum.

    Returns a dict with the keys "parameters", "gradients", "optimizer state" and "activations".
    For backward, autograd keeps the batch itself and the output of each ReLU.
    """
    raise NotImplementedError("predict_memory: count the numbers of each kind, times 4 bytes")


def largest_batch(widths, limit):
    """Returns the largest batch with which the four kinds together need at most `limit` bytes.

    Returns 0 if not even a batch of 1 fits.
    """
    raise NotImplementedError("largest_batch: which of the four kinds grow with the batch?")
