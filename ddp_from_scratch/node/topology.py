"""Ranks of a group by machine."""

from dataclasses import dataclass
from typing import Self

from ddp_from_scratch.node import semaphore
from ddp_from_scratch.node.communicator import Communicator
from ddp_from_scratch.node.shared_memory import can_share


@dataclass(frozen=True)
class Nodes:
    """A group's ranks by machine.

        machine 0   | rank 0 | rank 1 |    <- node: a row
        machine 1   | rank 2 | rank 3 |
                        ^ peers: a column

    Attributes:
        everyone: all ranks of the group.
        node: those of this machine, which share memory.
        peers: rank i of every machine that has one, where this is rank i of its own.
        count: number of machines.
        machines: for each of the peers, the ranks of its machine.
    """

    everyone: Communicator
    node: Communicator
    peers: Communicator
    count: int
    machines: list[list[int]]

    @classmethod
    def of(cls, everyone: Communicator, node: Communicator | None = None) -> Self:
        """Finds the ranks that share memory, unless given as `node`, which it then owns."""
        if node is None:
            here = everyone.split_by_machine()
            # Containers on one machine may be unable to share memory: then each rank counts as a
            # machine of its own.
            shared = semaphore.AVAILABLE and can_share(here)
            node = here.split(0 if shared else here.rank)
            here.free()
        peers = everyone.split(node.rank)
        # Every machine has a first rank, so the peers of that one count the machines.
        count = node.allgather(peers.size)[0]
        # A machine is known by its first rank.
        own = node.allgather(everyone.rank)[0]
        of_ranks = everyone.allgather(own)
        machines = [
            [rank for rank, other in enumerate(of_ranks) if other == machine]
            for machine in peers.allgather(own)
        ]
        return cls(everyone, node, peers, count, machines)

    @property
    def here(self) -> "Nodes":
        """This machine's ranks, as if there were no others."""
        here = [list(range(self.node.size))]
        return Nodes(self.node, self.node, self.node, count=1, machines=here)

    def free(self) -> None:
        """Frees `node` and `peers`, but not `everyone`. Collective."""
        self.node.free()
        self.peers.free()
