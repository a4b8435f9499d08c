"""Solutions of chapter 1."""

from itertools import pairwise


def predict_memory(widths, batch):
    """Predicts the bytes of a training step, by kind."""
    parameters = sum(4 * (inputs * outputs + outputs) for inputs, outputs in pairwise(widths))
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": parameters,  # the momentum: one number for each parameter
        "activations": 4 * batch * sum(widths),
    }


def largest_batch(widths, limit):
    """Returns the largest batch that fits into `limit` bytes."""
    fixed = sum(predict_memory(widths, 0).values())
    each = predict_memory(widths, 1)["activations"]
    return max(0, (limit - fixed) // each)
