"""The shared-memory engine over a communicator that knows nothing of MPI: a file, and folds."""

import pickle
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.errors import CommunicationError
from ddp_from_scratch.node.all_reduce import STAGED_FROM, AllReduce
from ddp_from_scratch.node.barrier import CheckedBarrier
from ddp_from_scratch.node.barrier_memory import EAGER_NBYTES
from ddp_from_scratch.node.communicator import Communicator
from ddp_from_scratch.node.reduction import Reduction
from ddp_from_scratch.node.staging import PIECE
from ddp_from_scratch.node.topology import Nodes
from ddp_from_scratch.node.windows import Windows


@dataclass
class StoreCommunicator:
    """Ranks that exchange everything through a store of torch's.

    Attributes:
        machines: by rank of the world, the number of the machine that it is taken to be on.
    """

    store: dist.Store
    rank: int
    size: int
    world_rank: int
    machines: list[int]
    calls: int = field(default=0)

    def allgather(self, value):
        self.calls += 1
        key = f"{self.calls}/"
        self.store.set(f"{key}{self.rank}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"{key}{rank}")) for rank in range(self.size)]

    def split(self, color):
        colors = self.allgather(color)
        members = [rank for rank, other in enumerate(colors) if other == color]
        store = dist.PrefixStore(f"{self.calls}/{color}", self.store)
        place = members.index(self.rank)
        return StoreCommunicator(store, place, len(members), self.world_rank, self.machines)

    def split_by_machine(self):
        return self.split(self.machines[self.world_rank])

    def free(self):
        pass

    def begin_allgather(self, own, gathered):
        self.calls += 1
        keys = [f"{self.calls}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], bytes(own).hex())

        def arrived():
            if not self.store.check(keys):
                return False
            gathered[:] = b"".join(bytes.fromhex(self.store.get(key).decode()) for key in keys)
            return True

        return arrived

    def all_reduce(self, flat, reduction):
        everybodys = [
            torch.tensor(values, dtype=flat.dtype) for values in self.allgather(flat.tolist())
        ]
        flat.copy_(reduction.fold(everybodys, torch.empty(len(flat), dtype=reduction.dtype)))


class Engine:
    """What a process group would make of it."""

    def __init__(self, communicator: Communicator) -> None:
        self.nodes = Nodes.of(communicator)
        self.barrier = CheckedBarrier(self.nodes)
        self.windows = Windows(self.nodes.node)
        self.reduce = AllReduce(self.nodes, self.barrier, self.windows)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        reduction = Reduction.of(op, tensor.dtype, self.nodes.everyone.size)
        place = self.reduce.prepare(tensor)
        self.barrier.meet(f"{reduction.name} of {tensor.numel()}", place, 20.0)
        self.reduce(tensor, reduction)
        return tensor

    def free(self):
        self.reduce.free()
        self.windows.free_unused()
        self.barrier.free()
        self.nodes.free()


def engine_of(world, path, machines):
    store = dist.FileStore(path, world.world_size)
    return Engine(StoreCommunicator(store, world.rank, world.world_size, world.rank, machines))


# Elements: eager on one machine, staged in one piece and in two, or in a window.
SIZES = (1, EAGER_NBYTES // 12 // 64 * 16, PIECE // 4, 5 * PIECE // 4 + 7)


def every_way(world, path):
    engine = engine_of(world, path, [0] * world.world_size)
    n, r = world.world_size, world.rank
    assert engine.nodes.count == 1
    for numel in SIZES:
        for make in (torch.empty, lambda numel: engine.windows.empty(numel, torch.float32)):
            tensor = make(numel).fill_(r + 1)
            assert engine.all_reduce(tensor).eq(n * (n + 1) / 2).all()
            tensor.fill_(2 * r)
            assert engine.all_reduce(tensor, dist.ReduceOp.AVG).eq(n - 1).all()
            tensor.fill_(r)
            assert engine.all_reduce(tensor, dist.ReduceOp.MAX).eq(n - 1).all()
    halves = torch.full((STAGED_FROM,), 1.0 if r == 0 else 2**-8, dtype=torch.bfloat16)
    assert engine.all_reduce(halves).eq(1 + 2**-7 if n == 3 else 1.0).all()
    engine.free()


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_over_a_store(ranks, tmp_path, size):
    ranks("gloo", size)(every_way, str(tmp_path / "store"))


def several_machines(world, path, machines):
    engine = engine_of(world, path, machines)
    n, r = world.world_size, world.rank
    assert engine.nodes.count == max(machines) + 1
    for make in (torch.empty, lambda numel: engine.windows.empty(numel, torch.float32)):
        for numel in (5, STAGED_FROM // 4 + 9):
            tensor = make(numel).fill_(r + 1)
            assert engine.all_reduce(tensor).eq(n * (n + 1) / 2).all()
    with pytest.raises(CommunicationError, match=r"different operations: .* another machine's"):
        engine.all_reduce(torch.ones(5 + machines[r]))


@pytest.mark.parametrize("machines", [[0, 1], [0, 0, 1]])
def test_all_reduce_between_machines_over_a_store(ranks, tmp_path, machines):
    ranks("gloo", len(machines))(several_machines, str(tmp_path / "store"), machines)


def owners(world, path):
    engine = engine_of(world, path, [0] * world.world_size)
    tensor = engine.windows.empty(1000, torch.float32).fill_(world.rank + 1.0)
    received = []
    engine.barrier.meet("owners", engine.windows.place(tensor), 20.0)
    average = Reduction.of(dist.ReduceOp.AVG, torch.float32, world.world_size)
    engine.reduce.to_owners(tensor, average, lambda at, chunk: received.append((at, chunk.clone())))
    assert tensor.eq(world.rank + 1.0).all()
    engine.barrier.wait()
    engine.free()
    ((begin, chunk),) = received
    assert chunk.eq((world.world_size + 1) / 2).all()
    return begin, begin + len(chunk)


def test_owners_receive_neighbouring_shares(ranks, tmp_path):
    shares = ranks("gloo", 3)(owners, str(tmp_path / "store"))
    assert shares == [(0, 336), (336, 672), (672, 1000)]


def one_is_missing(world, path):
    engine = engine_of(world, path, [0] * world.world_size)
    if world.rank == 0:
        with pytest.raises(CommunicationError, match=r"timeout of 0\.2 s passed without rank 1"):
            engine.barrier.meet("barrier", "", 0.2)
    dist.barrier()
    if world.rank == 1:
        with pytest.raises(CommunicationError, match="another rank has given up on it"):
            engine.barrier.meet("barrier", "", 20.0)


def test_a_missing_rank_is_named(ranks, tmp_path):
    ranks("gloo", 2)(one_is_missing, str(tmp_path / "store"))
