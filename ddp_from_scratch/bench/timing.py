"""Fair timing: contenders interleaved in one process group; the slowest rank counts."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_from_scratch import gpu
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, Contender
from ddp_from_scratch.bench.machine import on_terminal
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.errors import needs_extra
from ddp_from_scratch.sync.check_sync import check_sync

with needs_extra("train"):
    from tqdm import tqdm

# Also where a step is so slow that the time is over before.
FEWEST_ROUNDS = 5
WARM_UP = 3  # rounds that are not counted


def interleave(
    contenders: Sequence[Contender], rounds: Iterable[int], device: torch.device
) -> list[Samples]:
    """Times one step of each contender in every round, in a new random order each round.

    `WARM_UP` rounds before the first are not counted (torch's DDP and ours rebuild their buckets in
    the first, allocators settle). Whatever slows the machine for a while slows all alike.

    `rounds` yields the next round when the last one is over, so that it can count or look at the
    clock (`rounds_for`). It must yield the same number of rounds on all ranks.
    """
    order = np.random.default_rng(0)  # the same on every rank
    for turn in range(WARM_UP):
        for contender in contenders:
            _seed(turn)
            contender.step()
    times: list[list[float]] = [[] for _ in contenders]
    cpu_times: list[list[float]] = [[] for _ in contenders]
    # Times stay on their rank until the end: sending them in between would disturb the next step.
    for turn in rounds:
        for index in order.permutation(len(contenders)):
            _seed(WARM_UP + turn)
            dist.barrier()  # all begin together; each ends by itself
            gpu.synchronize(device)
            began, cpu_began = time.perf_counter(), time.process_time()
            # Nothing but the step is between the clocks: no barrier at its end, which would add the
            # wait for the others to what each rank measures by itself.
            contenders[index].step()
            cpu_ended = time.process_time()  # before the wait for a GPU, which spins
            gpu.synchronize(device)
            times[index].append(1e3 * (time.perf_counter() - began))
            cpu_times[index].append(1e3 * (cpu_ended - cpu_began))
    slowest = torch.tensor([times, cpu_times], dtype=torch.float64, device=device)
    # The next step waits for the slowest rank, so that rank's time is the round's.
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [
        Samples(c.name, milliseconds, cpu)
        for c, milliseconds, cpu in zip(contenders, *slowest.tolist(), strict=True)
    ]


def _seed(turn: int) -> None:
    """Lets dropout draw the same numbers for all contenders of a round, others on each rank."""
    torch.manual_seed(turn * dist.get_world_size() + dist.get_rank())


def rounds_for(
    seconds: float | None, count: int | None, device: torch.device, title: str
) -> Iterator[int]:
    """Rounds for `interleave`, with a progress bar on rank 0: `count` of them, or by the clock.

    The clock is rank 0's, and there are at least `FEWEST_ROUNDS`. The bar appears at once; the time
    begins with the first round, after the warm-up.
    """
    bar = tqdm(
        total=count or round(seconds or 0.0),
        desc=title,
        unit="round" if count else "s",
        disable=dist.get_rank() != 0 or not on_terminal(),
        leave=False,
    )
    return _rounds(seconds, count, device, bar)


def _rounds(
    seconds: float | None, count: int | None, device: torch.device, bar: "tqdm[Any]"
) -> Iterator[int]:
    began, turn = time.perf_counter(), 0
    while True:
        passed = time.perf_counter() - began
        # Decided by rank 0 for all: a rank that went on alone would wait for ever.
        over = torch.tensor([turn >= count if count else passed >= (seconds or 0.0)], device=device)
        dist.broadcast(over, 0)
        if over.item() and turn >= (count or FEWEST_ROUNDS):
            break
        yield turn
        turn += 1
        done = turn if count else min(round(time.perf_counter() - began), round(seconds or 0.0))
        bar.update(done - bar.n)
    bar.close()


def check_equal(contenders: Sequence[Contender], tolerance: float = 0.01) -> None:
    """Raises a RuntimeError for contenders that did not compute the same: no times to compare.

    Parameters must be equal over ranks to the bit, and over contenders up to the rounding of
    differently ordered sums: the distance between two contenders' parameters may be `tolerance` of
    how far training has moved them, where the start is known.
    """
    # Without communication ranks diverge, as they must.
    synchronised = [c for c in contenders if c.name != NO_COMMUNICATION]
    for contender in synchronised:
        first = synchronised[0]
        check_sync(contender.model)
        if contender.start:
            names = (contender.name, first.name)
            models = (contender.model.parameters(), first.model.parameters())
            check_distance(names, *models, contender.start, tolerance)
            continue
        expected = dict(first.model.named_parameters())
        for name, parameter in contender.model.named_parameters():
            # How far training has gone is unknown, so elements are compared.
            if not torch.allclose(parameter, expected[name], rtol=1e-3, atol=1e-5):
                raise _differ((contender.name, first.name), name)


@torch.no_grad()
def check_distance(
    names: tuple[str, str],
    some: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor],
    start: Iterable[torch.Tensor],
    tolerance: float = 0.01,
) -> None:
    """Raises a RuntimeError if two trained models are farther apart than part of their way.

    Their names are for the text. Both started from the parameters in `start`.
    """
    others = list(others)
    moved, apart = _distance(others, start), _distance(some, others)
    if not (moved > 0 and apart <= tolerance * moved):  # also what is not a number
        raise _differ(names, f"model, {apart:.2g} apart where training moved it by {moved:.2g}")


def _distance(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    squares = [(a - b).double().square().sum() for a, b in zip(some, others, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


def _differ(names: tuple[str, str], what: str) -> RuntimeError:
    return RuntimeError(
        f"{names[0]} and {names[1]} have trained to a different {what}: they cannot be compared"
    )
