"""Messages between two ranks on the mpi backend; rings of them are in the random operations."""

import pytest
import torch
import torch.distributed as dist


def messages(world):
    """Two tags, received in the other order; from any rank, into a strided tensor."""
    if world.rank == 0:
        for number in (1, 2):
            dist.isend(torch.tensor([number]), dst=1, tag=number)
        for _ in range(2):
            tensor = torch.empty(4, 2)
            sender = dist.recv(tensor.t())
            assert tensor.eq(float(sender)).all()
    else:
        for number in (2, 1) if world.rank == 1 else ():
            received = torch.empty(1, dtype=torch.int64)
            dist.recv(received, src=0, tag=number)
            assert received == number
        dist.send(torch.full((2, 4), float(world.rank)), dst=0)


def while_their_sender_sleeps(world):
    """MPI moves some only while their sender is in MPI, and it sleeps there until all have come."""
    handles = []
    for size in (1000, 5000, 100_000, 1_000_000):
        for count in (1, 20, 200):
            tensor = torch.zeros(size, dtype=torch.uint8)
            if world.rank == 0:
                handles += [dist.isend(tensor, dst=1) for _ in range(count)]
            if world.rank == 1:
                for _ in range(count):
                    dist.recv(tensor, src=0)
            dist.all_reduce(torch.ones(5), async_op=count == 20)
    for handle in handles:
        handle.wait()
    dist.barrier()


def that_do_not_fit(world):
    if world.rank == 0:
        for size in (10, 5, 10):
            dist.send(torch.ones(size), dst=1)
        return
    # MPI reports a larger one where it arrives.
    told = r"recv from rank 0 on rank 1 .* failed.*(?i:truncated)"
    with pytest.raises(RuntimeError, match=told):
        dist.recv(torch.ones(5), src=0)
    # A smaller one it takes: the rest would stay as it was.
    received = torch.zeros(10)
    handle = dist.irecv(received, src=0)
    with pytest.raises(RuntimeError, match=r"recv from rank 0 .*: 20 bytes came, expected 40$"):
        handle.wait()
    assert not handle.is_success()
    dist.recv(received, src=0)
    assert received.eq(1).all()


@pytest.mark.parametrize(
    ("called", "size"),
    [(messages, 3), (while_their_sender_sleeps, 2), (that_do_not_fit, 2)],
)
def test_messages(ranks, called, size):
    ranks("mpi", size)(called)
