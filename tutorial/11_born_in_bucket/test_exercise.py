import torch
from torch.nn.functional import linear

SHAPES = [(4, 3), (4,), (2, 4), (2,)]


def test_views(exercise):
    bucket = torch.arange(26.0)
    pieces = exercise.views(bucket, SHAPES)
    assert [piece.shape for piece in pieces] == [torch.Size(shape) for shape in SHAPES]
    assert torch.cat([piece.flatten() for piece in pieces]).equal(bucket)
    pieces[2].fill_(-1)
    assert bucket[16:24].eq(-1).all(), "the third piece is a copy"


def function(exercise):
    class IntoBucket(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, weight_view, bias_view):
            ctx.save_for_backward(x, weight)
            ctx.views = weight_view, bias_view
            return linear(x, weight, bias)

        @staticmethod
        def backward(ctx, gradient):
            return *exercise.backward(gradient, *ctx.saved_tensors, *ctx.views), None, None

    return IntoBucket.apply


def test_backward(exercise):
    torch.manual_seed(0)
    x = torch.randn(5, 3)
    parameters = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    first, second = parameters[:2], parameters[2:]
    expected = torch.autograd.grad(
        linear(linear(x, *first).relu(), *second).square().sum(), parameters
    )
    bucket = torch.zeros(26)
    pieces = bucket.split([12, 4, 8, 2])
    pieces = [piece.view(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]
    call = function(exercise)
    for _ in range(2):  # the second step finds the first step's numbers in the bucket
        for parameter in parameters:
            parameter.grad = None
        hidden = call(x, *first, *pieces[:2]).relu()
        call(hidden, *second, *pieces[2:]).square().sum().backward()
        for parameter, right, piece in zip(parameters, expected, pieces, strict=True):
            assert torch.allclose(parameter.grad, right), "another gradient than autograd's"
            assert torch.allclose(piece, right), "the gradient is not in the bucket"
            assert parameter.grad.data_ptr() == piece.data_ptr(), ".grad is a copy"
