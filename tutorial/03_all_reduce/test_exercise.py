import pytest
import torch
import torch.distributed as dist


def count_sends():
    """On a rank: counts the elements of every tensor that is sent from now on."""
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
    for rank, (numbers, _) in enumerate(results):
        assert numbers == [root + 1.0] * 5, f"rank {rank} has not the numbers of rank {root}"
    sends = [count for _, count in results]
    said = f"messages sent by each rank: {sends}; every rank but rank {root} receives once"
    assert sum(sends) == nproc - 1, said
    said = f"messages sent by each rank: {sends}; one rank sends in more rounds than there are"
    assert max(sends) <= (nproc - 1).bit_length(), said


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
    for rank, (numbers, sent) in enumerate(results):
        said = f"chunk {rank} of the sum, on rank {rank}; the digits show whose numbers are in it"
        assert numbers == expected[rank], said
        said = f"rank {rank} sends {sent} numbers, and {nproc - 1} chunks have {2 * (nproc - 1)}"
        assert sent == 2 * (nproc - 1), said
