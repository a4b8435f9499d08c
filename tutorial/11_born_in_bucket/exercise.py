"""Exercises of chapter 11: biases are born in the bucket, too.

python -m pytest tutorial/11_born_in_bucket
"""


def views(bucket, shapes):
    """Returns a view of the flat bucket for each shape, one behind the other, without a copy.

    `views(bucket, [(4, 3), (4,)])` gives the first 12 numbers as a matrix of 4 rows, and the next 4
    as a vector. `bucket.split([...])` cuts, and `view` gives a shape.
    """
    raise NotImplementedError("views: cut the bucket into pieces and give each its shape")


def backward(gradient, x, weight, weight_view, bias_view):
    """Returns the gradients of x, weight and bias of `linear(x, weight, bias)`.

    `gradient` is that of the output, of shape (batch, outputs); x has the shape (batch, inputs) and
    weight (outputs, inputs). Those of weight and bias are to be computed into their views, and
    what you return for them must be new tensors on the same memory: autograd keeps them as `.grad`.
    `torch.mm` and `torch.sum` take `out=`.
    """
    raise NotImplementedError("backward: compute both gradients into their views, return aliases")
