"""Tensors that the mpi backend refuses: traced, fake, lazy, sparse, on another device."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from ddp_from_scratch import mpi

COLLECTIVES = {
    "all_reduce": lambda t, n: dist.all_reduce(t),
    "reduce": lambda t, n: dist.reduce(t, 0),
    "broadcast": lambda t, n: dist.broadcast(t, 0),
    "all_gather": lambda t, n: dist.all_gather([torch.empty_like(t) for _ in range(n)], t),
    "all_gather_into_tensor": lambda t, n: dist.all_gather_into_tensor(torch.cat([t] * n), t),
    "gather": lambda t, n: dist.gather(t, [t] * n if dist.get_rank() == 0 else None, 0),
    "scatter": lambda t, n: dist.scatter(t, [t] * n if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda t, n: dist.reduce_scatter(t, [torch.empty_like(t) for _ in range(n)]),
    "all_to_all": lambda t, n: dist.all_to_all([torch.empty_like(t) for _ in range(n)], [t] * n),
    "all_to_all_single": lambda t, n: dist.all_to_all_single(
        torch.cat([t] * n), torch.cat([t] * n)
    ),
    "send": lambda t, n: dist.send(t, (dist.get_rank() + 1) % n),
    "recv": lambda t, n: dist.recv(t, (dist.get_rank() + 1) % n),
}


class Broadcasts(torch.nn.Module):
    def forward(self, x):
        dist.broadcast(x, 0)
        return x + 1


def tensors_without_memory(world):
    n = world.world_size
    for size in (4, 500_000):  # brought to the meeting, and staged
        real = torch.ones(size)
        for name, call in COLLECTIVES.items():
            with FakeTensorMode():
                fake = torch.ones(size)
                with pytest.raises(RuntimeError, match=f"{name} on the mpi backend cannot be"):
                    call(fake, n)
            with pytest.raises(RuntimeError, match=f"{name} .* got a FakeTensor that stands for"):
                call(fake, n)
            with pytest.raises(RuntimeError, match=f"{name} .* got torch.strided on meta"):
                call(torch.ones(size, device="meta"), n)
        with pytest.raises(RuntimeError, match=r"all_reduce .* negated or conjugated"):
            dist.all_reduce(torch.ones(size, dtype=torch.complex64).conj().imag)
        with pytest.raises(RuntimeError, match=r"broadcast .* got torch.sparse_coo on cpu"):
            dist.broadcast(real.to_sparse(), 0)
        with pytest.raises(RuntimeError, match=r"broadcast .* stands for others"):
            torch.func.vmap(lambda x: dist.broadcast(x, 0))(torch.ones(2, size))
        with pytest.raises(RuntimeError, match="all_reduce on the mpi backend cannot be traced"):
            make_fx(lambda x: dist.all_reduce(x), tracing_mode="fake")(real)
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"mpi.empty .* cannot be traced"):
            mpi.empty(size)
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"broadcast .* cannot be traced"):
            dist.broadcast(real, 0)
    with pytest.raises(RuntimeError, match="broadcast on the mpi backend cannot be traced"):
        torch.export.export(Broadcasts(), (torch.ones(4),), strict=False)
    with FakeTensorMode():  # what the errors advise
        assert funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD).shape == (4,)
    dist.all_reduce(real)
    assert real.eq(n).all()


def test_what_has_no_memory_is_refused_before_anything_is_sent(ranks):
    ranks("mpi", 2)(tensors_without_memory)
