"""Exercises of chapter 11: the biases' gradients are born in the bucket, too.

python -m pytest tutorial/11_born_in_bucket
"""


def views(bucket, shapes):
    """Returns a view of the flat bucket for each shape, one after the other, without a copy.

    `views(bucket, [(4, 3), (4,)])` gives the first 12 numbers as a matrix of 4 rows, and the next 4
    as a vector. `bucket.split([...])` cuts, and `view` gives a shape.
    """
    raise NotImplementedError("views: cut the bucket into pieces and give each its shape")


def backward(gradient, x, weight, weight_view, bias_view):
    """Returns the gradients of x, weight and bias of `linear(x, weight, bias)`.

    `gradient` is the output's, of shape (batch, outputs). x has the shape (batch, inputs) and
    weight (outputs, inputs). Compute the gradients of weight and bias into their views.
    Return new tensors on the same memory for them: autograd keeps these as `.grad`.
    `torch.mm` and `torch.sum` take `out=`.
    """
    raise NotImplementedError("backward: compute both gradients into their views, return aliases")
