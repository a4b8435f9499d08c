"""Contenders across a slow wire: torch's DDP and this library, exact and compressed."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ddp_from_scratch as ddp
from ddp_from_scratch.bench.contenders import (
    NO_COMMUNICATION,
    OPTIMIZERS,
    TORCH_BEST,
    Contender,
    ContenderSpec,
    Group,
    Optimizers,
    Prepare,
    Training,
    alone,
    contenders,
    flat,
    reducer,
    torch_ddp,
)
from ddp_from_scratch.bench.timing import WARM_UP, check_equal, check_ranks
from ddp_from_scratch.bench.workloads import Workload

TORCH, REDUCER, SGD = "torch DDP, views", "Reducer, views", "Reducer and ddp.SGD"
BF16, INT8, POWER_SGD = "Reducer, bf16", "Reducer, int8", "Reducer, PowerSGD rank 4"
TORCH_POWER_SGD = "torch DDP, PowerSGD rank 4"
COMPRESSED = (BF16, INT8, POWER_SGD, TORCH_POWER_SGD)
_VIEWS = {"gradient_as_bucket_view": True}

# Small, since with ten times this learning rate the order of float32 sums alone moves 4 ranks of
# ResNet-18 2 % of the way apart in some steps. The same holds for torch's DDP with other buckets.
_SETTINGS = {"lr": 1e-4, "momentum": 0.9}


def make_contenders(
    workload: Workload,
    device: torch.device,
    backend: str,
    powers: ddp.power_sgd.PowerSGDState,
    caps: Sequence[float],
) -> list[Contender]:
    """Makes every contender, with equal parameters and, on this rank, the same batch."""
    ways: dict[str, Prepare] = {NO_COMMUNICATION: alone}
    for cap in (None, *caps):
        size: dict[str, Any] = {"bucket_cap_mb": cap}
        suffix = "" if cap is None else f", {cap:g} MB buckets"
        ways[f"{TORCH}{suffix}"] = torch_ddp(**size, **TORCH_BEST)
        ways[REDUCER if cap is None else f"Reducer{suffix}"] = reducer(**size, **_VIEWS)
        ways[f"{SGD}{suffix}"] = flat(at_once=True, **size, **_VIEWS)
        for how, overlap in (("", False), (", overlap_forward", True)):
            ways[f"{SGD}, shard=world{how}{suffix}"] = flat(
                "world", at_once=True, overlap_forward=overlap, **size, **_VIEWS
            )
        ways[f"{BF16}{suffix}"] = _hooked(None, ddp.comm_hooks.bf16_compress_hook, **size)
        ways[f"{INT8}{suffix}"] = _hooked(
            ddp.comm_hooks.Int8State(), ddp.comm_hooks.int8_blockwise, **size
        )
    ways[POWER_SGD] = _hooked(powers, ddp.power_sgd.power_sgd_hook)
    if backend == "gloo":  # its callbacks call collectives, which mpi does not order
        ways[TORCH_POWER_SGD] = _torch_power_sgd(powers.start)
    specs = [ContenderSpec(name, prepare) for name, prepare in ways.items()]
    gentle = replace(OPTIMIZERS["sgd"], settings=_SETTINGS)
    return contenders(workload, device, specs, optimizers=gentle)


def _hooked(state: Any, hook: Any, **settings: Any) -> Prepare:
    def prepare(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
        made: list[ddp.Reducer] = []
        training = reducer(made=made, **settings, **_VIEWS)(model, group, optimizers)
        made[0].register_comm_hook(state, hook)
        return training

    return prepare


def _torch_power_sgd(start: int) -> Prepare:
    def prepare(model: nn.Module, group: Group, optimizers: Optimizers) -> Training:
        # One bucket: see the docstring of two_hosts.py.
        training = torch_ddp(bucket_cap_mb=1024, **TORCH_BEST)(model, group, optimizers)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=start
        )
        assert isinstance(training.forward, DistributedDataParallel)
        training.forward.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return training

    return prepare


def until_first_bucket(workload: Workload, rounds: int = 10) -> float:
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
    trained, batch, began = workload.model(), workload.batch(), [0.0]
    reducer = ddp.Reducer(trained, gradient_as_bucket_view=True)
    reducer.register_comm_hook(began, note)
    # The first rounds rebuild the buckets, so their first bucket differs.
    for _ in range(WARM_UP + rounds):
        trained.zero_grad()
        dist.barrier()
        began[0] = time.perf_counter()
        workload.loss(trained, batch).backward()
    reducer.remove()
    slowest = torch.tensor(found[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())


def check_alike(compared: Sequence[Contender]) -> None:
    """Checks that the contenders computed the same. Collective.

    Each contender's parameters must be bit-identical over ranks. Contenders in full precision may
    differ by a twentieth of the distance that training moved them, since their sums differ in order
    and rounding errors grow. Compressed contenders are not compared with others.

    Raises:
        RuntimeError: a check failed.
    """
    check_ranks(compared)
    check_equal([c for c in compared if not c.name.startswith(COMPRESSED)], 0.05)
