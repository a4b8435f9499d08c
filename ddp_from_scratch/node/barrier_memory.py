"""Shared memory of a `CheckedBarrier`, by field."""

from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_from_scratch.node import dissemination, fingerprint
from ddp_from_scratch.node.communicator import Communicator
from ddp_from_scratch.node.shared_memory import SharedMemory

# Bytes of the eager buffers of all ranks of a machine together. Each rank reads all of them, so
# with many ranks it is better to bring less and to read what another rank has summed.
EAGER_NBYTES = 256 * 1024


# A number of each rank, in its segment; an array of one element.
Counters: TypeAlias = "list[np.ndarray[Any, np.dtype[np.int64]]]"


class BarrierMemory:
    """One segment for each rank of the machine.

        semaphores | counters | fingerprints 0, 1 | heard 0, 1 | eager 0, 1

    Fingerprints, heard and eager buffers are double, for even and odd meetings: a fast rank brings
    its next ones while a slow one still reads these. (It cannot bring the ones after that, which
    need all ranks at the meeting between.)

    Collective to make. One for each rank, or for all ranks (*):

    Attributes:
        addresses: of the semaphores.
        come: number of waits that the rank has come to.
        passed: number of waits that the rank has passed: others need nothing more of it there.
        left: 1 once its program has ended: nobody need wait for it until the timeout.
        lost: 1 once others have given up for want of this rank.
        gave_up: * number of a meeting that a rank no longer waits for: none may go on alone then.
        fingerprints: a pair: the operation that the rank has come for.
        heard: * a pair: fingerprints of all machines' first ranks.
        eager: small tensors that the rank brings along; uint8, shape (2, eager_nbytes).
    """

    def __init__(self, node: Communicator, machines: int) -> None:
        heard_nbytes = machines * fingerprint.NBYTES if machines > 1 else 0
        counters_at = dissemination.nbytes(node.size)
        fingerprints_at = counters_at + 64  # counters share a cache line with nothing else
        heard_at = fingerprints_at + 2 * fingerprint.NBYTES
        eager_at = heard_at + 2 * heard_nbytes
        self.eager_nbytes = EAGER_NBYTES // max(node.size, 2) // 64 * 64
        self._memory = SharedMemory(node, eager_at + 2 * self.eager_nbytes)
        segments = self._memory.segments
        segments[node.rank][:eager_at].zero_()
        self.addresses = self._memory.addresses
        # Views that are made once: making one takes longer than a meeting.
        counters = [segment[counters_at:][:40].view(torch.int64).numpy() for segment in segments]
        self.come: Counters = [counter[0:1] for counter in counters]
        self.passed: Counters = [counter[1:2] for counter in counters]
        self.left: Counters = [counter[2:3] for counter in counters]
        self.lost: Counters = [counter[3:4] for counter in counters]
        self.gave_up = counters[0][4:5]
        self.fingerprints = [_pair(s, fingerprints_at, fingerprint.NBYTES) for s in segments]
        self.heard = _pair(segments[0], heard_at, heard_nbytes)
        self.eager = [segment[eager_at:].view(2, self.eager_nbytes) for segment in segments]

    def free(self) -> None:
        self._memory.free()


def _pair(segment: torch.Tensor, begin: int, nbytes: int) -> list[memoryview]:
    return [segment[begin + i * nbytes :][:nbytes].numpy().data for i in range(2)]
