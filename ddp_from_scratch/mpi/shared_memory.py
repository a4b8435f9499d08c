"""Memory that the ranks of one machine share: an MPI-3 window."""

import weakref

import numpy as np
import torch

from ..errors import CommunicationError
from .runtime import MPI


class SharedMemory:
    """A segment for each rank of a node; every rank sees all of them.

        window  | rank 0's segment | rank 1's segment | ...
                  nbytes             nbytes

    Collective to make and to free.

    Args:
        node: the ranks, which must be able to share memory.
        nbytes: size of each rank's segment.

    Attributes:
        addresses: where each rank's segment begins, in this process.
        segments: each rank's segment, as uint8 tensors of shape (nbytes,); not this rank's own
            after it was taken.

    Raises:
        CommunicationError: the memory is not to be had.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        self.nbytes = nbytes
        info = MPI.Info.Create()
        info.Set("alloc_shared_noncontig", "true")  # each segment near the rank that fills it
        try:
            self._window = MPI.Win.Allocate_shared(max(nbytes, 1), 1, info, node)
        except MPI.Exception as error:
            raise CommunicationError(
                f"cannot share {nbytes} bytes a rank with the {node.size} ranks of this machine "
                f"({error}): is there room in /dev/shm?"
            ) from error
        finally:
            info.Free()
        memories = [self._window.Shared_query(rank)[0] for rank in range(node.size)]
        self.addresses = [memory.address for memory in memories]
        arrays = [np.asarray(memory)[:nbytes] for memory in memories]
        # Each tensor that lies in the segment keeps the array alive.
        self._in_use = weakref.ref(arrays[node.rank])
        self.segments = [torch.from_numpy(array) for array in arrays]

    def take(self) -> torch.Tensor:
        """This rank's own segment, which is then in use for as long as the tensor lives. Once."""
        rank = self._window.Get_group().rank
        taken, self.segments[rank] = self.segments[rank], torch.empty(0, dtype=torch.uint8)
        return taken

    @property
    def in_use(self) -> bool:
        """Whether a tensor lies in this rank's segment."""
        return self._in_use() is not None

    def free(self) -> None:
        """Gives the memory back. No tensor may lie in it any more, on any rank."""
        self.segments = []
        self._window.Free()
