"""Times contenders fairly: interleaved in one process group, the slowest rank counts."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.strategies import NO_COMMUNICATION, Contender
from ddp_from_scratch import check_sync


@dataclass(frozen=True)
class Samples:
    """Milliseconds of one contender's steps, round by round; of the slowest rank in each."""

    name: str
    milliseconds: list[float]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The 25th, 50th and 75th percentile."""
        low, median, high = np.percentile(self.milliseconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def ratio_to(self, other: "Samples") -> tuple[float, float, float]:
        """Median of the ratios round by round, with its 95 % bootstrap interval."""
        ratios = np.array(self.milliseconds) / np.array(other.milliseconds)
        drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        return float(np.median(ratios)), float(low), float(high)


def interleave(
    contenders: Sequence[Contender], rounds: Iterable[int], device: torch.device
) -> list[Samples]:
    """One step of each contender in every round, in an order drawn anew each round.

    Three rounds before the first are not counted (torch's DDP and ours rebuild their buckets in
    the first, allocators settle). Whatever slows the machine for a while slows all alike.
    """
    order = np.random.default_rng(0)  # the same on every rank
    for _ in range(3):
        for contender in contenders:
            contender.step()
    times: list[list[float]] = [[] for _ in contenders]
    for _ in rounds:
        for index in order.permutation(len(contenders)):
            dist.barrier()
            _synchronize(device)
            began = time.perf_counter()
            contenders[index].step()
            _synchronize(device)
            times[index].append(1e3 * (time.perf_counter() - began))
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [Samples(c.name, row) for c, row in zip(contenders, slowest.tolist(), strict=True)]


def check_equal(contenders: Sequence[Contender]) -> None:
    """Refuses to compare what did not compute the same.

    Parameters must be equal over ranks to the bit, and over strategies up to the rounding of
    differently ordered sums.

    Raises:
        RuntimeError: it has not, so the times cannot be compared.
    """
    synchronised = [c for c in contenders if c.name != NO_COMMUNICATION]
    expected = dict(synchronised[0].model.named_parameters())
    for contender in synchronised:
        check_sync(contender.model)
        for name, parameter in contender.model.named_parameters():
            if not torch.allclose(parameter, expected[name], rtol=1e-3, atol=1e-5):
                raise RuntimeError(
                    f"{contender.name} and {synchronised[0].name} have trained to a different "
                    f"{name}: their times cannot be compared"
                )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
