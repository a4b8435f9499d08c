"""Contenders across a slow wire: torch's DDP and this library, exact and compressed."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_from_scratch as ddp
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, TORCH_BEST, Contender
from ddp_from_scratch.bench.timing import WARM_UP, check_distance

TORCH, REDUCER, SGD = "torch DDP, views", "Reducer, views", "Reducer and ddp.SGD"
BF16, POWER_SGD = "Reducer, bf16", "Reducer, PowerSGD rank 4"
TORCH_POWER_SGD = "torch DDP, PowerSGD rank 4"
COMPRESSED = (BF16, POWER_SGD, TORCH_POWER_SGD)

Training = tuple[nn.Module, torch.optim.Optimizer]

# Small, since with ten times this learning rate the order of float32 sums alone moves 4 ranks of
# ResNet-18 2 % of the way apart in some steps. The same holds for torch's DDP with other buckets.
_LR, _MOMENTUM = 1e-4, 0.9


def contenders(
    model: Callable[[], nn.Module],
    batch: tuple[torch.Tensor, torch.Tensor],
    backend: str,
    powers: ddp.power_sgd.PowerSGDState,
    caps: Sequence[float] = (),
) -> list[Contender]:
    """Makes every contender, with equal parameters and, on this rank, the same batch."""

    def reduced(trained: nn.Module, cap: float | None = None) -> ddp.Reducer:
        ddp.broadcast_parameters(trained)
        return ddp.Reducer(trained, bucket_cap_mb=cap, gradient_as_bucket_view=True)

    def wrapped(trained: nn.Module, **settings: Any) -> DistributedDataParallel:
        return DistributedDataParallel(trained, **TORCH_BEST, **settings)  # type: ignore[arg-type]

    def bare(trained: nn.Module) -> Training:
        return trained, fused_sgd(trained)

    def torch_ddp(trained: nn.Module, cap: float | None = None) -> Training:
        return wrapped(trained, bucket_cap_mb=cap), fused_sgd(trained)

    def reducer(trained: nn.Module, cap: float | None = None) -> Training:
        reduced(trained, cap)
        return trained, fused_sgd(trained)

    def flat_sgd(trained: nn.Module, cap: float | None = None) -> Training:
        averaging = reduced(trained, cap)
        sgd = ddp.SGD(trained.parameters(), _LR, _MOMENTUM, reducer=averaging)
        return trained, sgd

    def bf16(trained: nn.Module, cap: float | None = None) -> Training:
        reduced(trained, cap).register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)
        return trained, fused_sgd(trained)

    def power_sgd(trained: nn.Module) -> Training:
        reduced(trained).register_comm_hook(powers, ddp.power_sgd.power_sgd_hook)
        return trained, fused_sgd(trained)

    def torch_power_sgd(trained: nn.Module) -> Training:
        # One bucket: see the docstring of two_hosts.py.
        called = wrapped(trained, bucket_cap_mb=1024)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=powers.start
        )
        called.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return called, fused_sgd(trained)

    ways: dict[str, Callable[[nn.Module], Training]] = {
        NO_COMMUNICATION: bare,
        TORCH: torch_ddp,
        REDUCER: reducer,
        SGD: flat_sgd,
        BF16: bf16,
        POWER_SGD: power_sgd,
    }
    for cap in caps:
        ways[f"{TORCH}, {cap:g} MB buckets"] = partial(torch_ddp, cap=cap)
        ways[f"Reducer, {cap:g} MB buckets"] = partial(reducer, cap=cap)
        ways[f"{SGD}, {cap:g} MB buckets"] = partial(flat_sgd, cap=cap)
        ways[f"{BF16}, {cap:g} MB buckets"] = partial(bf16, cap=cap)
    if backend == "gloo":  # its callbacks call collectives, which mpi does not order
        ways[TORCH_POWER_SGD] = torch_power_sgd
    return [_contender(name, model, prepare, batch) for name, prepare in ways.items()]


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), _LR, _MOMENTUM, fused=True)


def _contender(
    name: str,
    model: Callable[[], nn.Module],
    prepare: Callable[[nn.Module], Training],
    batch: tuple[torch.Tensor, torch.Tensor],
) -> Contender:
    torch.manual_seed(0)
    trained = model()
    called, optimizer = prepare(trained)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(called(batch[0]), batch[1])
        if isinstance(optimizer, ddp.SGD):
            optimizer.backward_and_step(loss)
        else:
            loss.backward()
            optimizer.step()

    return Contender(name, trained, step)


def until_first_bucket(
    model: Callable[[], nn.Module], batch: tuple[torch.Tensor, torch.Tensor], rounds: int = 10
) -> float:
    """Returns the ms from a step's start until its first bucket could be sent. Collective.

    The comm hook sends nothing; it notes the time and returns the bucket unchanged. The result is
    the median over rounds of the slowest rank.
    """
    found: list[float] = []

    def note(began: list[float], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            found.append(1e3 * (time.perf_counter() - began[0]))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    torch.manual_seed(0)
    trained, began = model(), [0.0]
    reducer = ddp.Reducer(trained, gradient_as_bucket_view=True)
    reducer.register_comm_hook(began, note)
    # The first rounds rebuild the buckets, so their first bucket differs.
    for _ in range(WARM_UP + rounds):
        trained.zero_grad()
        dist.barrier()
        began[0] = time.perf_counter()
        cross_entropy(trained(batch[0]), batch[1]).backward()
    reducer.remove()
    slowest = torch.tensor(found[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())


def check_alike(compared: Sequence[Contender], model: Callable[[], nn.Module]) -> None:
    """Checks that the contenders computed the same. Collective.

    Each contender's parameters must be bit-identical over ranks. Contenders in full precision may
    differ by a twentieth of the distance that training moved them, since their sums differ in order
    and rounding errors grow. Compressed contenders are not compared with others.

    Raises:
        RuntimeError: a check failed.
    """
    synchronised = [c for c in compared if c.name != NO_COMMUNICATION]
    for contender in synchronised:
        ddp.check_sync(contender.model)
    torch.manual_seed(0)
    start = list(model().parameters())
    first, *others = (c for c in synchronised if not c.name.startswith(COMPRESSED))
    expected = list(first.model.parameters())
    for other in others:
        names = (other.name, first.name)
        check_distance(names, other.model.parameters(), expected, start, 0.05)
