"""Memory that the ranks of one machine share: a file without a name, in memory.

MPI's windows are not used: they are files in `/dev/shm`, which containers often keep at 64 MB, and
where one rank finds no room there, the others wait for it.
"""

import mmap
import os
import warnings
import weakref
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ddp_from_scratch.errors import NoSharedMemory
from ddp_from_scratch.node.communicator import Communicator

# Tensors that outlive a call are made under it. The program may be in inference mode in that call,
# and tensors that are made there cannot be written to elsewhere.
LASTING = torch.inference_mode(False)

# Bytes of all ranks of a machine: a barrier's memory, which a group cannot do without, and more.
# Tried before the barrier is made: other machines would wait for ranks that find no room there.
_TO_MEET = 2**20


class SharedMemory:
    """A segment for each rank of a node; every rank sees all of them.

        memory  | rank 0's segment | rank 1's segment | ...
                  nbytes             nbytes, from the next page on

    Collective to make; a failure raises NoSharedMemory on all ranks. The memory is gone
    with the last process that has it, however that ends.

    Args:
        node: the ranks.
        nbytes: size of this rank's segment; may differ over ranks.

    Attributes:
        addresses: of each rank's segment, in this process.
        segments: of each rank, as flat uint8 tensors; empty for one that was taken.
    """

    @LASTING
    def __init__(self, node: Communicator, nbytes: int) -> None:
        sizes = node.allgather(nbytes)
        # Each on pages of its own: a page lies near the processor that first writes to it.
        *begins, end = accumulate(
            (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0
        )
        memory = _map(node, max(end, mmap.PAGESIZE))
        self._arrays = [
            np.frombuffer(memory, np.uint8, size, begin)
            for size, begin in zip(sizes, begins, strict=True)
        ]
        self.addresses = [array.ctypes.data for array in self._arrays]
        self._taken: weakref.ref[np.ndarray[Any, Any]] | None = None
        self.segments = [torch.from_numpy(array) for array in self._arrays]

    @LASTING
    def take(self, rank: int) -> torch.Tensor:
        """A rank's segment, in use for as long as a tensor lies in it. Called once."""
        # The tensor alone owns the array from now on, and views of it own it, too: when the weak
        # reference dies, no tensor lies in the segment any more.
        self._taken = weakref.ref(self._arrays[rank])
        taken, self.segments[rank] = self.segments[rank], torch.empty(0, dtype=torch.uint8)
        self._arrays.clear()
        return taken

    @property
    def in_use(self) -> bool:
        return self._taken is not None and self._taken() is not None

    def free(self) -> None:
        """Unmaps it, once no tensor lies in it any more."""
        self.segments = []
        self._arrays.clear()


def can_share(node: Communicator) -> bool:
    """True where these ranks can share memory, enough to meet. Collective: the same on all."""
    try:
        SharedMemory(node, _TO_MEET // node.size).free()
    except NoSharedMemory as error:
        if node.rank == 0:
            warnings.warn(f"messages take the place of shared memory: {error}", stacklevel=2)
        return False
    return True


def _map(node: Communicator, nbytes: int) -> mmap.mmap:
    """Zeros that are the same memory on all ranks of the node."""
    if node.size == 1:
        try:
            return mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as error:
            raise NoSharedMemory(f"this rank cannot have {nbytes} bytes: {error}") from error
    mapped, file, found = None, -1, ("", (0, 0))
    problem = ""
    if node.rank == 0:
        try:
            file = _nameless_file(nbytes)
            found = (f"/proc/{os.getpid()}/fd/{file}", _identity(file))
        except OSError as error:
            problem = str(error)
    (path, identity), problem = node.allgather((found, problem))[0]
    if not problem:
        try:
            mapped = _map_file(path, identity, nbytes)
        except OSError as error:
            problem = str(error)
    # All ranks hear of any rank's problem, so that none waits for one that has given up. The first
    # rank's file stays open until then: the others open it by the number that it has there.
    problems = [text for text in node.allgather(problem) if text]
    if file >= 0:
        os.close(file)
    if mapped is None or problems:
        raise NoSharedMemory(
            f"the {node.size} ranks of this machine cannot share {nbytes} bytes: {problems[0]}"
        )
    return mapped


def _nameless_file(nbytes: int) -> int:
    """A descriptor of zeros in memory, or an OSError."""
    # Linux would grant more than there is, and end the process that writes to it.
    if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        raise OSError("this machine has less memory")
    file = os.memfd_create("ddp")
    try:
        os.ftruncate(file, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def _map_file(path: str, identity: tuple[int, int], nbytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(file) != identity:  # containers number their processes each from 1
            raise OSError(f"{path} is another container's")
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
