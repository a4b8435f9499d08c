from itertools import pairwise

import pytest
import torch


def measure_memory(widths, batch):
    """Trains for one step, and counts the bytes that it holds."""
    model = torch.nn.Sequential()
    for inputs, outputs in pairwise(widths):
        model.extend([torch.nn.Linear(inputs, outputs), torch.nn.ReLU()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.randn(batch, widths[0])).square().mean()
    loss.backward()
    optimizer.step()
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters()),
        "optimizer state": sum(s["momentum_buffer"].nbytes for s in optimizer.state.values()),
        "activations": sum(size for place, size in kept.items() if place not in parameters),
    }


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("widths", [(3, 2), (784, 128, 10), (64, 64, 64, 64)])
def test_predict_memory(exercise, widths, batch):
    predicted = exercise.predict_memory(widths, batch)
    for kind, measured in measure_memory(widths, batch).items():
        said = f"{kind}: bytes predicted, and measured, for widths {widths} and a batch of {batch}"
        assert predicted[kind] == measured, said


@pytest.mark.parametrize("widths", [(3, 2), (784, 128, 10)])
def test_largest_batch(exercise, widths):
    fits = sum(measure_memory(widths, 17).values())
    assert exercise.largest_batch(widths, fits) == 17, "exactly what a batch of 17 needs"
    assert exercise.largest_batch(widths, fits - 1) == 16, "a byte less than a batch of 17 needs"
    assert exercise.largest_batch(widths, 1) == 0, "one byte: nothing fits"
