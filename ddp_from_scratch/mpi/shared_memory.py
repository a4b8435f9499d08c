"""Memory that the ranks of one machine share: an MPI-3 window."""

import weakref
from typing import Any

import numpy as np
import torch

from ..errors import NoSharedMemory
from .runtime import MPI


class SharedMemory:
    """A segment for each rank of a node; every rank sees all of them.

        window  | rank 0's segment | rank 1's segment | ...
                  nbytes             nbytes

    Collective to make and to free.

    Args:
        node: the ranks, which must be able to share memory.
        nbytes: size of this rank's segment; may differ over ranks.

    Attributes:
        addresses: where each rank's segment begins, in this process.
        segments: each rank's segment, as uint8 tensors of shape (its nbytes,); not one that was
            taken.

    Raises:
        NoSharedMemory: the memory is not to be had.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        self.nbytes = nbytes
        info = MPI.Info.Create()
        info.Set("alloc_shared_noncontig", "true")  # each segment near the rank that fills it
        try:
            self._window = MPI.Win.Allocate_shared(max(nbytes, 1), 1, info, node)
        except MPI.Exception as error:
            raise NoSharedMemory(
                f"cannot share {nbytes} bytes a rank with the {node.size} ranks of this machine "
                f"({error}): is there room in /dev/shm?"
            ) from error
        finally:
            info.Free()
        memories = [self._window.Shared_query(rank)[0] for rank in range(node.size)]
        self.addresses = [memory.address for memory in memories]
        sizes = node.allgather(nbytes)  # a window may be larger than what was asked for
        self._arrays = [np.asarray(m)[:size] for m, size in zip(memories, sizes, strict=True)]
        self._taken: weakref.ref[np.ndarray[Any, Any]] | None = None
        self.segments = [torch.from_numpy(array) for array in self._arrays]

    def take(self, rank: int) -> torch.Tensor:
        """A rank's segment, which is then in use here for as long as the tensor lives. Once."""
        # Each tensor that lies in the segment keeps the array alive.
        self._taken = weakref.ref(self._arrays[rank])
        taken, self.segments[rank] = self.segments[rank], torch.empty(0, dtype=torch.uint8)
        self._arrays.clear()
        return taken

    @property
    def in_use(self) -> bool:
        """Whether a tensor lies in the segment that was taken."""
        return self._taken is not None and self._taken() is not None

    def free(self) -> None:
        """Gives the memory back. No tensor may lie in it any more, on any rank."""
        self.segments = []
        self._arrays.clear()
        self._window.Free()
