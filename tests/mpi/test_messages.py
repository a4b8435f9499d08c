"""Messages between two ranks on the mpi backend."""

import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.mpi.p2p import P2PWork


def messages(world):
    n, r = world.world_size, world.rank
    after, before = (r + 1) % n, (r - 1) % n
    received = torch.empty(3)
    # Every rank posts its receive before its send, which must not deadlock.
    receive = dist.irecv(received, src=before)
    send = dist.isend(torch.full((3,), float(r)), dst=after)
    receive.wait(), send.wait()
    assert received.tolist() == [float(before)] * 3
    if r == 0:  # two tags, received in the other order
        dist.isend(torch.tensor([1]), dst=1, tag=1)
        dist.isend(torch.tensor([2]), dst=1, tag=2)
    if r == 1:
        second, first = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        dist.recv(second, src=0, tag=2)
        dist.recv(first, src=0, tag=1)
        assert (first.item(), second.item()) == (1, 2)
    dist.barrier()
    if r == 0:
        senders = set()
        for _ in range(n - 1):
            tensor = torch.empty(4, 2)
            sender = dist.recv(tensor.t())  # from any rank, into a strided tensor
            assert tensor.eq(float(sender)).all()
            senders.add(sender)
        assert senders == set(range(1, n))
    else:
        dist.send(torch.full((2, 4), float(r)), dst=0)


def test_send_and_receive(crew):
    crew(messages)


def messages_before_collectives(world):
    """MPI moves some only while their sender is in MPI, and it sleeps there until all have come."""
    handles = []
    for size in (1000, 3000, 5000, 20_000, 100_000, 1_000_000):
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


def test_messages_go_on_while_their_sender_sleeps(crew):
    crew(messages_before_collectives)


class Interrupted:
    """MPI's request, and a signal that comes while somebody looks at it."""

    def Test(self, status):  # mpi4py's name
        signal.raise_signal(signal.SIGALRM)
        return True


def a_handler_that_looks_at_messages(world):
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(message.is_completed()))
    try:
        message = P2PWork("recv", timedelta(seconds=5), Interrupted(), torch.empty(1))
        assert message.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [False]


def test_a_signals_handler_does_not_wait_for_who_it_interrupts(ranks):
    ranks("mpi", 2)(a_handler_that_looks_at_messages)


def a_message_that_does_not_fit(world):
    """MPI reports it where the larger message arrives."""
    if world.rank == 0:
        dist.send(torch.ones(10), dst=1)
    else:
        with pytest.raises(
            RuntimeError, match=r"recv from rank 0 on rank 1 .* failed.*(?i:truncated)"
        ):
            dist.recv(torch.ones(5), src=0)


def test_an_error_of_mpi_reaches_wait(ranks):
    ranks("mpi", 2)(a_message_that_does_not_fit)


def a_message_that_leaves_a_rest(world):
    """MPI takes it: the rest would stay as it was."""
    if world.rank == 0:
        dist.send(torch.ones(5), dst=1)
        dist.send(torch.ones(10), dst=1)
    else:
        received = torch.zeros(10)
        with pytest.raises(RuntimeError, match=r"recv from rank 0 .*: 20 bytes came, expected 40$"):
            dist.recv(received, src=0)
        dist.recv(received, src=0)
        assert received.eq(1).all()


def test_a_message_that_leaves_a_rest_is_an_error(ranks):
    ranks("mpi", 2)(a_message_that_leaves_a_rest)
