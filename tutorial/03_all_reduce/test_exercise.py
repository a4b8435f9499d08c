import pytest
import torch
import torch.distributed as dist


def count_sends():
    """On a rank: from now on, notes the number of elements of all that is sent."""
    counted = []
    send, isend = dist.send, dist.isend

    def note(tensor, *arguments, then, **more):
        counted.append(tensor.numel())
        return then(tensor, *arguments, **more)

    dist.send = lambda *arguments, **more: note(*arguments, then=send, **more)
    dist.isend = lambda *arguments, **more: note(*arguments, then=isend, **more)
    return counted


def broadcast(exercise, root):
    counted = count_sends()
    tensor = torch.full((5,), dist.get_rank() + 1.0)
    exercise.tree_broadcast(tensor, root)
    return tensor.tolist(), len(counted)


@pytest.mark.parametrize(("nproc", "root"), [(4, 0), (5, 3)])
def test_tree_broadcast(on_ranks, nproc, root):
    results = on_ranks(nproc, broadcast, root)
    assert [numbers for numbers, _ in results] == [[root + 1.0] * 5] * nproc
    sends = [count for _, count in results]
    assert sum(sends) == nproc - 1, f"messages sent by each rank: {sends}"
    assert max(sends) <= (nproc - 1).bit_length(), f"messages sent by each rank: {sends}"


def scatter(exercise):
    counted = count_sends()
    rank, nproc = dist.get_rank(), dist.get_world_size()
    chunk = exercise.reduce_scatter(torch.arange(2 * nproc) * 10**rank)
    return chunk.tolist(), sum(counted)


@pytest.mark.parametrize("nproc", [2, 3])
def test_reduce_scatter(on_ranks, nproc):
    results = on_ranks(nproc, scatter)
    ones = int("1" * nproc)
    expected = [[2 * rank * ones, (2 * rank + 1) * ones] for rank in range(nproc)]
    assert [numbers for numbers, _ in results] == expected
    assert [sent for _, sent in results] == [2 * (nproc - 1)] * nproc
