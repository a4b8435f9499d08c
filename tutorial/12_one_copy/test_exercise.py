from importlib import import_module

import torch
import torch.distributed as dist

chapter_10 = import_module("tutorial.10_shared_memory.shared_memory")
SIZE, RATE, FACTOR, STEPS = 1001, 0.1, 0.9, 5


def test_make_momentum(exercise):
    parameters = torch.randn(SIZE)
    parts = [exercise.make_momentum(rank, 3, parameters) for rank in range(3)]
    assert sum(map(len, parts)) == SIZE, "all ranks together must have one copy"
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert not torch.cat(parts).any()


def gradients(step, rank):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def train(exercise, folder):
    rank, nproc = dist.get_rank(), dist.get_world_size()
    memory = chapter_10.SharedMemory(folder, SIZE)
    parameters, rows = memory.total, memory.rows
    momentum = exercise.make_momentum(rank, nproc, parameters)
    for step in range(STEPS):
        rows[rank].add_(gradients(step, rank))
        exercise.step(parameters, rows, momentum, rank, RATE, FACTOR, memory.meet)
        if rows[rank].any():
            return f"step {step}: this rank's gradients are not zero at the end"
    memory.meet()
    return parameters.clone()


def test_step(on_ranks, tmp_path):
    results = on_ranks(3, train, str(tmp_path))
    expected = torch.zeros(SIZE, requires_grad=True)
    optimizer = torch.optim.SGD([expected], lr=RATE, momentum=FACTOR)
    for step in range(STEPS):
        expected.grad = sum(gradients(step, rank) for rank in range(3)) / 3
        optimizer.step()
    for found in results:
        assert not isinstance(found, str), found
        assert torch.allclose(found, expected.detach(), atol=1e-6), "not torch's parameters"
