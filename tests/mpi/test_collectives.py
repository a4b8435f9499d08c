"""Collectives on the mpi backend: torch.distributed's calls give torch.distributed's answers."""

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.mpi import datatypes
from tests.mpi.test_messages import messages

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
)


def all_reduce_every_dtype(world):
    n = world.world_size
    for dtype in DTYPES:
        tensor = torch.full((5,), world.rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [n * (n + 1) / 2] * 5, dtype


def test_all_reduce_sums_every_dtype(crew):
    crew(all_reduce_every_dtype)


def all_reduce_operations(world):
    n, r = world.world_size, world.rank
    expected = {
        dist.ReduceOp.SUM: n * (n + 1) // 2,
        dist.ReduceOp.PRODUCT: torch.arange(1, n + 1).prod().item(),
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: n,
        dist.ReduceOp.BAND: [0, 0, 0][n - 2],
        dist.ReduceOp.BOR: [3, 3, 7][n - 2],
        dist.ReduceOp.BXOR: [3, 0, 4][n - 2],
    }
    for op, value in expected.items():
        tensor = torch.tensor([r + 1])
        dist.all_reduce(tensor, op)
        assert tensor.item() == value, op
    tensor = torch.tensor([r + 1.0])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.item() == (n + 1) / 2
    for op, value in {dist.ReduceOp.SUM: True, dist.ReduceOp.PRODUCT: False}.items():
        tensor = torch.tensor([r == 0])
        dist.all_reduce(tensor, op)
        assert tensor.item() is value, op


def test_all_reduce_operations(crew):
    crew(all_reduce_operations)


def wrong_operations(world):
    for op, dtype in ((dist.ReduceOp.BAND, torch.float32), (dist.ReduceOp.MAX, torch.complex64)):
        with pytest.raises((ValueError, RuntimeError), match="reduce"):
            dist.all_reduce(torch.ones(2, dtype=dtype), op)
    with pytest.raises(RuntimeError, match=r"cannot reduce tensors of torch\.float8_e4m3fn"):
        dist.all_reduce(torch.ones(8, dtype=torch.float8_e4m3fn))
    dist.barrier()  # and the group still works


def test_an_operation_that_mpi_does_not_have_is_an_error(ranks):
    ranks("mpi", 2)(wrong_operations)


def sixteen_bit_floats_are_summed_in_float32(world):
    # 1 + 2**-8 is not a bfloat16; summed in float32, 1 + 2**-8 + 2**-8 rounds to 1 + 2**-7.
    tensor = torch.tensor([1.0 if world.rank == 0 else 2**-8], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert tensor.item() == 1 + 2**-7


def test_sixteen_bit_floats_are_rounded_once(ranks):
    ranks("mpi", 3)(sixteen_bit_floats_are_summed_in_float32)


def odd_tensors(world):
    n = world.world_size
    transposed = torch.full((3, 4), world.rank + 1.0).t()
    dist.all_reduce(transposed)
    assert transposed.tolist() == [[n * (n + 1) / 2] * 3] * 4
    every_second = torch.full((8,), world.rank + 1.0)
    dist.broadcast(every_second[::2], src=1)
    assert every_second.tolist() == [2.0, world.rank + 1.0] * 4
    gathered = [torch.empty(4, 3) for _ in range(n)]
    dist.all_gather(gathered, torch.arange(12.0).view(3, 4).t() + world.rank)
    assert all(g.equal(torch.arange(12.0).view(3, 4).t() + i) for i, g in enumerate(gathered))
    scalar = torch.tensor(world.rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == n * (n + 1) / 2
    one_of_many = torch.full((1, 2), world.rank + 1.0)[:, 0]
    assert one_of_many.stride() == (2,)
    dist.all_reduce(one_of_many)
    assert one_of_many.item() == n * (n + 1) / 2
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, src=0)
    assert empty.shape == (0, 3)


def test_strided_empty_and_zero_dimensional_tensors(crew):
    crew(odd_tensors)


def moving_collectives(world):
    n, r = world.world_size, world.rank
    for dtype in (*DTYPES, torch.bool):
        tensor = torch.full((2, 2), r % 2, dtype=dtype)
        dist.broadcast(tensor, src=1)
        assert tensor.equal(torch.ones(2, 2, dtype=dtype))
    mine = torch.tensor([r, 10 * r])
    everyone = [torch.empty(2, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(everyone, mine)
    assert [t.tolist() for t in everyone] == [[i, 10 * i] for i in range(n)]
    stacked = torch.empty(2 * n, dtype=torch.int64)
    dist.all_gather_into_tensor(stacked, mine)
    assert stacked.tolist() == [v for i in range(n) for v in (i, 10 * i)]
    parts = [torch.empty(2, dtype=torch.int64) for _ in range(n)] if r == 1 else None
    dist.gather(mine, parts, dst=1)
    if parts is not None:
        assert [t.tolist() for t in parts] == [[i, 10 * i] for i in range(n)]
    received = torch.empty(2, dtype=torch.int64)
    dist.scatter(received, [torch.tensor([i, i * i]) for i in range(n)] if r == 0 else None, src=0)
    assert received.tolist() == [r, r * r]


def test_broadcast_gather_and_scatter(crew):
    crew(moving_collectives)


def scattering_collectives(world):
    n, r = world.world_size, world.rank
    tensor = torch.full((3,), r + 1.0)
    dist.reduce(tensor, dst=1)
    assert tensor.tolist() == [n * (n + 1) / 2 if r == 1 else r + 1.0] * 3
    # Rank r gets r + 1 elements: everybody's part r.
    own = torch.empty(r + 1)
    dist.reduce_scatter(own, [torch.full((i + 1,), float(r + i)) for i in range(n)])
    assert own.tolist() == [n * (n - 1) / 2 + n * r] * (r + 1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        own = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(own, torch.arange(2 * n).to(dtype))
        assert own.tolist() == [n * 2 * r, n * (2 * r + 1)]
    average = torch.empty(1)
    dist.reduce_scatter_tensor(average, torch.full((n,), r + 1.0), op=dist.ReduceOp.AVG)
    assert average.item() == (n + 1) / 2


def test_reduce_and_reduce_scatter(crew):
    crew(scattering_collectives)


def all_to_all(world):
    n, r = world.world_size, world.rank
    received = [torch.empty(s + 1) for s in range(n)]
    dist.all_to_all(received, [torch.full((r + 1,), 10.0 * r + s) for s in range(n)])
    assert [t.tolist() for t in received] == [[10.0 * s + r] * (s + 1) for s in range(n)]
    rows = torch.empty(n, 2)
    dist.all_to_all_single(rows, torch.full((n, 2), float(r)))
    assert rows.tolist() == [[float(s)] * 2 for s in range(n)]
    # Rank r sends s + 1 rows to rank s.
    received, sent = torch.empty(n * (r + 1), 2), torch.full((n * (n + 1) // 2, 2), float(r))
    dist.all_to_all_single(received, sent, [r + 1] * n, list(range(1, n + 1)))
    assert received[:, 0].tolist() == [float(s) for s in range(n) for _ in range(r + 1)]
    with pytest.raises(ValueError, match=f"split sizes that add up to {n}"):
        dist.all_to_all_single(rows, torch.ones(n, 2), [n + 1] + [0] * (n - 1), [1] * n)


def test_all_to_all(crew):
    crew(all_to_all)


def gathering_of_different_sizes(world):
    n, r = world.world_size, world.rank
    gathered = [torch.empty(s + 1) for s in range(n)]
    dist.all_gather(gathered, torch.full((r + 1,), float(r)))
    assert [t.tolist() for t in gathered] == [[float(s)] * (s + 1) for s in range(n)]


def test_all_gather_of_different_sizes(crew):
    crew(gathering_of_different_sizes)


def coalesced(world):
    n, r = world.world_size, world.rank
    tensors = [torch.full((i + 1,), r + 1.0) for i in range(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.eq(n * (n + 1) / 2).all() for tensor in tensors)
    sent, received = torch.tensor([float(r)]), torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, sent, (r + 1) % n),
        dist.P2POp(dist.irecv, received, (r - 1) % n),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.item() == (r - 1) % n


def test_coalesced_operations(crew):
    crew(coalesced)


def object_collectives(world):
    n, r = world.world_size, world.rank
    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": r, "text": "x" * r})
    assert everyone == [{"rank": i, "text": "x" * i} for i in range(n)]
    one = [("from", r)]
    dist.broadcast_object_list(one, src=n - 1)
    assert one == [("from", n - 1)]
    gathered = [None] * n if r == 0 else None
    dist.gather_object(r, gathered, dst=0)
    assert gathered == (list(range(n)) if r == 0 else None)
    received = [None]
    dist.scatter_object_list(received, [f"for {i}" for i in range(n)], src=0)
    assert received == [f"for {r}"]


def test_object_collectives(crew):
    crew(object_collectives)


def asynchronous(world):
    n, r = world.world_size, world.rank
    tensors = [torch.full((1000,), float(i * (r + 1))) for i in range(20)]
    handles = [dist.all_reduce(t, async_op=True) for t in tensors]
    for handle in reversed(handles):
        assert handle.wait()
    assert all(handle.is_completed() for handle in handles)
    for i, tensor in enumerate(tensors):
        assert tensor.eq(i * n * (n + 1) / 2).all()
    tensor = torch.ones(4)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.then(lambda f: f.value()[0] / n).wait().tolist() == [1.0] * 4
    # The handle is dropped at once; the tensor must live until the operation has ended.
    dist.all_reduce(torch.ones(100_000), async_op=True)
    dist.barrier()


def test_asynchronous_operations_and_futures(crew):
    crew(asynchronous)


def test_bitwise_reductions_are_for_integers():
    with pytest.raises(RuntimeError, match="float32"):
        datatypes.operation(dist.ReduceOp.BXOR, torch.float32)


def in_pieces(world):
    """Everything again, as if MPI could count to 64 only."""
    limits = [(datatypes, "COUNTABLE"), (datatypes, "BLOCK")]
    kept = [getattr(module, name) for module, name in limits]
    for module, name in limits:
        setattr(module, name, 16 if name == "BLOCK" else 64)
    try:
        for check in (gathering_of_different_sizes, all_to_all, messages):
            check(world)
        n, r = world.world_size, world.rank
        tensor = torch.full((1000,), r + 1.0)
        dist.reduce(tensor, dst=1)
        assert r != 1 or tensor.eq(n * (n + 1) / 2).all()
        tensor.copy_(torch.arange(1000) + r)
        dist.broadcast(tensor, src=1)
        assert tensor.tolist() == list(range(1, 1001))
        if r == 0:
            dist.send(tensor, dst=1)
        if r == 1:
            received = torch.empty(1000)
            assert dist.recv(received) == 0
            assert received.equal(tensor)
        parts = [torch.empty(100) for _ in range(n)] if r == 0 else None
        dist.gather(torch.full((100,), float(r)), parts, dst=0)
        assert r != 0 or all(part.eq(i).all() for i, part in enumerate(parts))
        dist.scatter(tensor[:100], parts, src=0)
        assert tensor[:100].eq(r).all()
        shares = torch.arange(n * 100.0)
        dist.reduce_scatter_tensor(tensor[:100], shares)
        assert tensor[:100].equal(n * torch.arange(r * 100.0, (r + 1) * 100))
    finally:
        for (module, name), value in zip(limits, kept, strict=True):
            setattr(module, name, value)


def test_what_mpi_cannot_count_goes_in_pieces(ranks):
    ranks("mpi", 3)(in_pieces)
