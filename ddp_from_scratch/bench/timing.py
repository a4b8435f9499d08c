"""Fair timing: contenders take turns in the same processes, and the slowest rank counts."""

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, Contender
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.errors import needs_extra
from ddp_from_scratch.sync.check_sync import check_sync

with needs_extra("train"):
    from tqdm import tqdm

FEWEST_ROUNDS = 5  # even if the time is over before
WARM_UP = 3  # rounds that are not counted


def warm_up(contenders: Sequence[Contender]) -> None:
    """Runs `WARM_UP` rounds, in which buckets are rebuilt once and allocators settle."""
    for turn in range(WARM_UP):
        for contender in contenders:
            _seed(turn)
            contender.step()


def interleave(
    contenders: Sequence[Contender], rounds: Iterable[int], device: torch.device
) -> list[Samples]:
    """Times one step of each contender in every round, in a new random order each round.

    Call `warm_up` before. `rounds` may look at the clock, but must be as many on all ranks.
    """
    order = np.random.default_rng(0)  # the same on every rank
    times: list[list[float]] = [[] for _ in contenders]
    cpu_times: list[list[float]] = [[] for _ in contenders]
    # Times stay on their rank until the end, since sending them would disturb the next step.
    for turn in rounds:
        for index in order.permutation(len(contenders)):
            _seed(WARM_UP + turn)
            dist.barrier()  # all ranks begin together
            gpu.synchronize(device)
            began, cpu_began = time.perf_counter(), time.process_time()
            # No barrier after the step, which would add the wait for other ranks.
            contenders[index].step()
            cpu_ended = time.process_time()  # before the wait for a GPU, which spins
            gpu.synchronize(device)
            times[index].append(1e3 * (time.perf_counter() - began))
            cpu_times[index].append(1e3 * (cpu_ended - cpu_began))
    slowest = torch.tensor([times, cpu_times], dtype=torch.float64, device=device)
    # The next step waits for the slowest rank, so its time counts.
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [
        Samples(c.name, milliseconds, cpu)
        for c, milliseconds, cpu in zip(contenders, *slowest.tolist(), strict=True)
    ]


def _seed(turn: int) -> None:
    """Makes dropout equal for all contenders of a round, and different on each rank."""
    torch.manual_seed(turn * dist.get_world_size() + dist.get_rank())


def rounds_for(
    seconds: float | None, count: int | None, device: torch.device, title: str
) -> Iterator[int]:
    """Yields `count` rounds, or as many as rank 0's clock allows from the first round on."""
    bar = tqdm(
        total=count or round(seconds or 0.0),
        desc=title,
        unit="round" if count else "s",
        disable=dist.get_rank() != 0 or None,  # None: not on a terminal, either
        leave=False,
    )
    began, turn = time.perf_counter(), 0
    while True:
        passed = time.perf_counter() - began
        # Rank 0 decides for all, since a rank that continued alone would hang.
        over = torch.tensor([turn >= count if count else passed >= (seconds or 0.0)], device=device)
        dist.broadcast(over, 0)
        if over.item() and turn >= (count or FEWEST_ROUNDS):
            break
        yield turn
        turn += 1
        done = turn if count else min(round(time.perf_counter() - began), round(seconds or 0.0))
        bar.update(done - bar.n)
    bar.close()


def check_ranks(contenders: Sequence[Contender]) -> None:
    """Raises a RuntimeError unless each contender's parameters are bit-identical over ranks."""
    for contender in contenders:
        if contender.name != NO_COMMUNICATION:
            check_sync(contender.model)


def check_equal(contenders: Sequence[Contender], tolerance: float = 0.01) -> None:
    """Raises a RuntimeError if contenders computed different results, so times do not compare.

    Parameters must be bit-identical over ranks. Contenders sum in other orders, so theirs may
    differ by `tolerance` times the distance that training moved them. Call it after few steps: some
    kernels of a GPU round differently in each run, and training amplifies that.
    """
    check_ranks(contenders)
    first, *others = (c for c in contenders if c.name != NO_COMMUNICATION)
    for other in others:
        models = (other.model.parameters(), first.model.parameters())
        check_distance((other.name, first.name), *models, other.start, tolerance)


@torch.no_grad()
def check_distance(
    names: tuple[str, str],
    some: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    start: Iterable[torch.Tensor],
    tolerance: float = 0.01,
) -> None:
    """Raises a RuntimeError if two models differ by more than `tolerance` of their training."""
    others = list(others)
    moved, apart = _distance(others, start), _distance(some, others)
    if not (moved > 0 and apart <= tolerance * moved):  # negated to catch NaN
        raise RuntimeError(
            f"{names[0]} and {names[1]} have trained to a different model, {apart:.2g} apart where "
            f"training moved it by {moved:.2g}: they cannot be compared"
        )


def _distance(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    squares = [(a - b).double().square().sum() for a, b in zip(some, others, strict=True)]
    return float(torch.stack(squares).sum().sqrt())
