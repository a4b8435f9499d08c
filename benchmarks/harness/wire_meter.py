"""Meter of the wire between two hosts: counts bytes, and refuses those that took another way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.harness import network
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, Contender
from ddp_from_scratch.bench.timing import WARM_UP


@dataclass(frozen=True)
class Result:
    """One contender across one wire.

    Attributes:
        name: the contender's.
        milliseconds: of the slowest rank, round by round.
        must_cross: bytes that each host must send in a step; None where that is not known.
        sent: bytes that left each host in a step, by the counter of its interface: one list a
            host, round by round.
        bound: milliseconds that a step needs at least: by the wire and the time until the first
            bucket is ready, or, `with_computing`, where that is more, by what it takes without
            communication. None where `must_cross` is.
    """

    name: str
    milliseconds: list[float]
    must_cross: int | None
    sent: list[list[int]]
    bound: float | None

    @property
    def most_sent(self) -> float:
        """Median bytes in a step of the host that sends more."""
        return max(float(np.median(of_host)) for of_host in self.sent)

    @property
    def over_bound(self) -> float | None:
        """The median step as a multiple of the bound; None where nothing is known to cross."""
        if not self.bound or not self.must_cross:
            return None
        return float(np.median(self.milliseconds)) / self.bound


def with_computing(results: Sequence[Result]) -> list[Result]:
    """With bounds that are no less than the median step without communication. Idempotent.

    On a fast wire that is what limits: no step sends its gradients without computing them.
    """
    (alone,) = (r.milliseconds for r in results if r.name == NO_COMMUNICATION)
    # Measured in the same rounds as the others: the machine is as busy.
    least = float(np.median(alone))
    return [r if r.bound is None else replace(r, bound=max(r.bound, least)) for r in results]


def limit_ms(nbytes: float, gbit: float) -> float:
    """Milliseconds that the wire needs for so many bytes, without headers."""
    return nbytes * 8 / (gbit * 1e9) * 1e3


class Meter:
    """Counts the bytes that leave through this host's end of the wire, step by step.

    It reads before each step, when the ranks have met: then the bytes of the step before have all
    arrived. (That counts their meeting in, some hundred bytes.)
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        self._last, self._name = network.crossed_bytes()[0], ""

    def before(self, contender: Contender) -> Callable[[], None]:
        """The contender's step, counted."""

        def step() -> None:
            self.read()
            self._name = contender.name
            contender.step()

        return step

    def read(self) -> None:
        """Attributes the bytes since the last reading to the step before."""
        now = network.crossed_bytes()[0]
        self.sent.setdefault(self._name, []).append(now - self._last)
        self._last = now


def gather_sent(meter: Meter, counts: bool) -> dict[str, list[list[int]]]:
    """By contender, for each host what it sent in each timed step. Collective.

    Args:
        meter: this rank's.
        counts: True on the one rank that speaks for its host.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, meter.sent if counts else None)
    hosts = [sent for sent in everyone if sent is not None]  # in the order of ranks, so of hosts
    return {name: [of_host[name][WARM_UP:] for of_host in hosts] for name in hosts[0] if name}


def check_crossed(results: list[Result], gbit: float) -> None:
    """Refuses results that did not come through the wire.

    Raises:
        RuntimeError: a host sent less than it must have, or faster than the wire lets it.
    """
    for r in results:
        for host, sent in enumerate(r.sent):
            for milliseconds, nbytes in zip(r.milliseconds, sent, strict=True):
                # Shared memory or loopback between the hosts would be a faster result, and a wrong
                # one.
                if nbytes < (r.must_cross or 0):
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in a step, and "
                        f"{r.must_cross:,} must cross: it went round the wire"
                    )
                # The token bucket lets its savings leave at once.
                if limit_ms(nbytes, gbit) > 1.02 * milliseconds + 10:
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in {milliseconds:.0f} "
                        f"ms: more than {gbit:g} Gbit/s"
                    )
