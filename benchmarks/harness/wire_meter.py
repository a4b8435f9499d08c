"""Counts the bytes on the wire between two hosts, and rejects results that bypassed it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.harness import network
from ddp_from_scratch.bench.contenders import Contender
from ddp_from_scratch.bench.timing import WARM_UP


@dataclass(frozen=True)
class Result:
    """One contender across one wire."""

    name: str
    milliseconds: list[float]  # of the slowest rank, by round
    must_cross: int | None  # bytes that each host must send in a step; None if unknown
    sent: list[list[int]]  # bytes by host and round, by the counter of the host's interface
    # The least ms of a step: until the first bucket is ready and on the wire, or without
    # communication if that is more. None if `must_cross` is None.
    bound: float | None

    @property
    def most_sent(self) -> float:
        """The median bytes per step of the host that sends more."""
        return max(float(np.median(of_host)) for of_host in self.sent)

    @property
    def over_bound(self) -> float | None:
        """The median step as a multiple of the bound; None if no bytes are known to cross."""
        if not self.bound or not self.must_cross:
            return None
        return float(np.median(self.milliseconds)) / self.bound


def limit_ms(nbytes: float, gbit: float) -> float:
    """Returns the milliseconds that the wire needs for `nbytes`, without headers."""
    return nbytes * 8 / (gbit * 1e9) * 1e3


class Meter:
    """Counts the bytes that this host sends over the wire in each step.

    It reads the counter after the barrier before each step, when all bytes of the last step have
    arrived. The count includes the barrier, some hundred bytes.
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        self._last, self._name = network.crossed_bytes()[0], ""

    def before(self, contender: Contender) -> Callable[[], None]:
        """Returns the contender's step with a reading before it."""

        def step() -> None:
            self.read()
            self._name = contender.name
            contender.step()

        return step

    def read(self) -> None:
        """Attributes the bytes since the last reading to the last step."""
        now = network.crossed_bytes()[0]
        self.sent.setdefault(self._name, []).append(now - self._last)
        self._last = now


def gather_sent(meter: Meter, counts: bool) -> dict[str, list[list[int]]]:
    """Returns, by contender, the bytes that each host sent in each timed step. Collective.

    `counts` is True on one rank per host, whose meter counts.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, meter.sent if counts else None)
    hosts = [sent for sent in everyone if sent is not None]  # in the order of ranks, so of hosts
    return {name: [of_host[name][WARM_UP:] for of_host in hosts] for name in hosts[0] if name}


def check_crossed(results: list[Result], gbit: float) -> None:
    """Raises a RuntimeError if a host sent less than it must, or faster than the wire allows."""
    for r in results:
        for host, sent in enumerate(r.sent):
            for milliseconds, nbytes in zip(r.milliseconds, sent, strict=True):
                # Shared memory or loopback between the hosts would give a faster, wrong result.
                if nbytes < (r.must_cross or 0):
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in a step, and "
                        f"{r.must_cross:,} must cross: it went round the wire"
                    )
                # The token bucket sends a burst at once.
                if limit_ms(nbytes, gbit) > 1.02 * milliseconds + 10:
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in {milliseconds:.0f} "
                        f"ms: more than {gbit:g} Gbit/s"
                    )
