import pytest
import torch
import torch.distributed as dist

SIZE, STEPS, NPROC = 600, 4, 3


def held(exercise):
    """What this rank holds after a step of Adam, and what the exercise predicts."""
    rank = dist.get_rank()
    parameters, gradients = torch.randn(SIZE), torch.randn(SIZE)
    mine = parameters.chunk(NPROC)[rank]
    mine.grad = gradients.chunk(NPROC)[rank]
    adam = torch.optim.Adam([mine])
    adam.step()
    state = sum(tensor.nbytes for tensor in adam.state[mine].values())
    found = {"parameters": parameters.nbytes, "gradients": gradients.nbytes, "state": state}
    return found, exercise.predict_memory(SIZE, NPROC)


def test_predict_memory(on_ranks):
    for found, predicted in on_ranks(NPROC, held):
        for kind, size in found.items():
            assert predicted[kind] == size, f"{kind}: bytes predicted, and held"


def gradients_of(step, rank):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def train(exercise, limit):
    rank = dist.get_rank()
    parameters, gradients, sent = torch.ones(SIZE), torch.zeros(SIZE), []
    mine = parameters.chunk(NPROC)[rank]
    mine.grad = gradients.chunk(NPROC)[rank]
    optimizer = torch.optim.SGD([mine], lr=0.1, momentum=0.9)
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *more: (sent.append(tensor.numel()), all_reduce(tensor, *more))
    for step in range(STEPS):
        gradients.copy_(gradients_of(step, rank))
        exercise.step(parameters, gradients, optimizer, limit)
    return parameters, sent


@pytest.mark.parametrize("limit", [1.0, 1000.0])
def test_step(on_ranks, limit):
    expected = torch.ones(SIZE, requires_grad=True)
    optimizer = torch.optim.SGD([expected], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        expected.grad = sum(gradients_of(step, rank) for rank in range(NPROC)) / NPROC
        torch.nn.utils.clip_grad_norm_([expected], limit)
        optimizer.step()
    for rank, (parameters, sent) in enumerate(on_ranks(NPROC, train, limit)):
        said = f"rank {rank} has not the parameters of one process that clips to {limit:g}"
        assert torch.allclose(parameters, expected.detach(), atol=1e-5), said
        assert sum(sent) <= STEPS, "all-reduce one number in each step, and no gradients"
