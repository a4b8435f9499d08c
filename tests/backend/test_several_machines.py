"""All-reduces of ranks on one machine, and on several for which it stands."""

import time
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.backend.all_reduce import GATHERED, STAGED_FROM, crossing_in
from ddp_from_scratch.backend.barrier import ALONG_NBYTES, EAGER_NBYTES
from ddp_from_scratch.backend.reduction import CHUNK
from ddp_from_scratch.backend.stage import PIECE_ACROSS
from tests.support.machines import OPERATIONS, SIZES, group_over, machines
from tests.support.tiers import slow

ROW = EAGER_NBYTES  # elements, enough to be staged
PATIENCE = timedelta(seconds=20)


def over_machines(world, sizes):
    n, r = world.world_size, world.rank
    group = group_over(world, sizes)
    assert group.machines == len(sizes)
    makes = [torch.empty, lambda numel: group.empty(numel, torch.float32)]
    if len(sizes) == 1:
        makes.append(lambda numel: torch.empty(numel, 2)[:, 0])  # strided
        makes.append(lambda numel: group.empty(numel, torch.float64))
    for make in makes:
        for numel in (*SIZES, 3 * PIECE_ACROSS // 4 + 1):
            tensor = make(numel)
            for op, expected in OPERATIONS.items():  # rank r brings r + 1, last r + 2
                tensor.fill_(r + 1)
                tensor[-1] = r + 2
                dist.all_reduce(tensor, op, group=group)
                assert tensor[:-1].eq(expected(range(1, n + 1))).all(), (numel, op)
                assert tensor[-1] == expected(range(2, n + 2)), (numel, op)
    for outside in range(n):  # one rank has a tensor in no window: all go the same way
        shared = group.empty(PIECE_ACROSS, torch.float32)
        tensor = (torch.empty(PIECE_ACROSS) if r == outside else shared).fill_(r + 1)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(n * (n + 1) / 2).all()
    tensor = torch.full((5,), r + 1.0)
    group.average_on_machine(tensor).wait()
    here = [rank + 1 for rank in range(n) if machines(sizes, rank) == machines(sizes, r)]
    assert tensor.eq(sum(here) / len(here)).all()
    for numel in (9, STAGED_FROM) if len(sizes) > 1 else ():
        # 257 in bfloat16 is 256: each machine's sum is rounded once, and nothing else.
        for make in makes[:2]:
            tensor = make(numel).fill_(257.0)
            group.allreduce([tensor], crossing=crossing_in(torch.bfloat16)).wait()
            by_machine = numel > 9 or make is not torch.empty
            sums = [257.0 * size for size in sizes] if by_machine else [257.0] * n
            assert tensor.eq(torch.tensor(sums).bfloat16().sum().float()).all(), numel


def in_windows(world, sizes):
    """A reduce-scatter and an all-gather without copies, in place too, and from other memory."""
    check_windows(world, group_over(world, sizes), len(set(sizes)) == 1)
    if sizes == (2, 2):
        check_windows(world, group_over(world, lambda rank: rank % 2), copies_nothing=True)


def check_windows(world, group, copies_nothing):
    n, r = world.world_size, world.rank
    for counts in ([5] * n, [0, 40_000, *[3] * (n - 2)], [CHUNK + 16] * n):
        for make in (torch.empty, lambda numel: group.empty(numel, torch.float32)):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                whole = make(sum(counts)).copy_(torch.arange(sum(counts)) % 97 + r)
                parts = list(whole.split(counts))
                terms = sum(torch.arange(sum(counts)) % 97 + rank for rank in range(n))
                expected = (terms / (n if op == dist.ReduceOp.AVG else 1)).split(counts)[r]
                in_window = make is not torch.empty
                with copied(group, not (in_window and copies_nothing)):
                    for output in (torch.empty(counts[r]), parts[r]):
                        dist.reduce_scatter(output, parts, op, group=group)
                        assert torch.equal(output, expected), (counts, op)
        for make in (torch.empty, lambda numel: group.empty(numel, torch.float32)):
            output = make(n * counts[-1])
            own = output[r * counts[-1] : (r + 1) * counts[-1]]
            for tensor in (torch.full((counts[-1],), r + 1.0), own.fill_(r + 7.0)):
                expected = [torch.full((counts[-1],), float(tensor[0]) - r + k) for k in range(n)]
                in_window = make is not torch.empty
                with copied(group, not (in_window and copies_nothing)):
                    dist.all_gather_into_tensor(output, tensor, group=group)
                assert torch.equal(output, torch.cat(expected))


@contextmanager
def copied(group, expected):
    """Whether the exchange takes a copy through the stage, in eager buffers or by messages."""
    kind = type(group._exchange)
    with patch.object(kind, "_pieces", autospec=True, side_effect=kind._pieces) as copies:
        yield
    assert copies.called == expected


def small_ones(world, sizes):
    """What is small travels with the barrier's message: no other is sent."""
    layouts = [(sizes, max(sizes))]
    if sizes == (2, 2):
        layouts.append((lambda rank: rank % 2, 2))
    for machines_of, most in layouts:
        group = group_over(world, machines_of)
        room = ALONG_NBYTES // most // 16 * 16
        for numel in (1, room // 8, room // 8 + 1):
            check_small(world, group, numel, sends=8 * numel > room)
        # In lanes for each rank a number less fits.
        check_all_to_all(world, group, room // 8 // world.world_size)
    for step in range(50):  # a rank that is ahead overwrites nothing that another still reads
        value = torch.tensor([step + 0.5 * world.rank], dtype=torch.float64)
        if step % (world.rank + 2) == 0:
            time.sleep(0.002)
        dist.all_reduce(value, group=group)
        n = world.world_size
        assert value.item() == n * step + 0.25 * n * (n - 1)


def check_small(world, group, numel, sends):
    n, r = world.world_size, world.rank
    values = torch.arange(n * numel, dtype=torch.float64).view(n, numel).add(0.1)
    total = sum(values.unbind())
    for root in range(n):
        with messages(group, sends):
            sent = values[r].clone()
            dist.broadcast(sent, root, group=group)
        assert torch.equal(sent, values[root])
    with messages(group, sends):
        summed = values[r].clone()
        dist.all_reduce(summed, group=group)
    assert torch.equal(summed, total)
    with messages(group, sends):
        gathered = torch.empty_like(values)
        dist.all_gather_into_tensor(gathered, values[r], group=group)
    assert torch.equal(gathered, values)
    with messages(group, sends):
        reduced = values[r].clone()
        dist.reduce(reduced, n - 1, group=group)
    assert torch.equal(reduced, total if r == n - 1 else values[r])
    half = torch.full((2,), r + 1.0)  # of this machine alone
    group.average_on_machine(half).wait()
    here = group._topology.intra_node.world_ranks
    assert half.eq(sum(rank + 1 for rank in here) / len(here)).all()


def check_all_to_all(world, group, numel):
    n, r = world.world_size, world.rank
    output, whole = torch.empty(2, n * numel, dtype=torch.float64).unbind()
    for rank in range(n):
        whole[rank * numel : (rank + 1) * numel] = 10 * r + rank
    with messages(group, False):
        part = torch.empty(numel, dtype=torch.float64)
        dist.reduce_scatter_tensor(part, whole, group=group)
    assert part.eq(sum(10 * rank + r for rank in range(n))).all()
    dist.all_to_all_single(output, whole, group=group)
    assert output.tolist() == [10.0 * rank + r for rank in range(n) for _ in range(numel)]


@contextmanager
def messages(group, expected):
    """Whether messages are sent besides the barrier's."""
    kind = type(group._topology.world)
    with patch.object(kind, "exchange", autospec=True, side_effect=kind.exchange) as exchanges:
        yield
    assert exchanges.called == expected


def asleep(seconds, sleep=time.sleep):
    sleep(max(seconds, 0.7))


def failures_over_machines(world, sizes):
    # Who is missing is known on its own machine, elsewhere only that it is on another one.
    near = machines(sizes, world.rank) == 0
    group = group_over(world, sizes, timedelta(seconds=0.5))
    if world.rank > 0:
        missing = "rank 0$" if near else "ranks on other machines$|another rank has given up"
        with pytest.raises(RuntimeError, match=missing), patch.object(time, "sleep", asleep):
            dist.barrier(group)
    dist.barrier()
    # Different calls are told, wherever they come from.
    group = group_over(world, sizes, PATIENCE)
    with pytest.raises(RuntimeError, match=r"different operations: .* another machine's ranks all"):
        dist.all_reduce(torch.ones(5 if near else 6), group=group)


# Elements: none, fewer than ranks, on either side of what 2 and 3 ranks gather, of what is left to
# messages, and more than are summed at a time.
SIXTEEN_BIT_SIZES = (
    *(0, 1, 2, GATHERED // 6, GATHERED // 6 + 1, GATHERED // 4, GATHERED // 4 + 1),
    *(STAGED_FROM // 2 - 1, STAGED_FROM // 2, 5 * CHUNK + 7),
)


def sixteen_bits(world, sizes):
    n, r = world.world_size, world.rank
    group = group_over(world, sizes)
    for make in (torch.empty, lambda n, dtype: group.empty(n, dtype)):
        for numel in SIXTEEN_BIT_SIZES:
            # Small integers: exact, but for averages over 3, rounded at the end.
            values = torch.arange(n * numel).view(n, numel).remainder(7).sub(3).float()
            tensor = make(numel, dtype=torch.bfloat16)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensor.copy_(values[r])
                dist.all_reduce(tensor, op, group=group)
                total = values.sum(0) / (n if op == dist.ReduceOp.AVG else 1)
                torch.testing.assert_close(tensor, total.bfloat16())
    # Whatever the values, the bits are everybody's.
    generator = torch.Generator().manual_seed(r)
    for numel in SIXTEEN_BIT_SIZES:
        tensor = torch.randn(numel, generator=generator).bfloat16()
        dist.all_reduce(tensor, group=group)
        bits = [None] * n
        dist.all_gather_object(bits, tensor.view(torch.uint8).numpy().tobytes())
        assert len(set(bits)) == 1, numel


# Each with the machines' sizes: node over the first in the quick tier; mpi and node in turn.
# One machine of two ranks on node, and one of three on mpi, are in the quick tier, too.
CALLED = {
    over_machines: [(2, 1), (2, 2), (1, 1), (4,), (4,)],
    failures_over_machines: [(2, 1), (1, 1)],
    sixteen_bits: [(2, 1), (1, 1, 1), (1, 2)],
    in_windows: [(2, 2), (1, 2), (1, 1), (4,)],
    small_ones: [(2, 2), (1, 2), (1, 1), (3, 1)],
}
CASES = [(called, "node", every[0]) for called, every in CALLED.items()]
CASES += [(over_machines, "node", (2,)), (over_machines, "mpi", (3,))]
for called, every in CALLED.items():
    CASES += [slow(called, ("mpi", "node")[i % 2], sizes) for i, sizes in enumerate(every)]


@pytest.mark.parametrize(("called", "backend", "sizes"), CASES)
def test_several_machines(ranks, called, backend, sizes):
    ranks(backend, sum(sizes))(called, sizes)
