"""The messages of an elastic job, which continues without lost ranks (docs/how-to/elastic.md).

Each process has a number that the job never reuses. The processes that train together form a
*generation*. Only machine 0's agent announces generations: it knows which processes are alive, so a
job cannot split into two halves that both continue.

    agent        announces generation g with its members
    process      writes its step and that it has joined g
    agent        adds to the announcement that a member has joined, and the steps when all have
    process      opens the group; asks for the next generation when it has lost a peer, or to join

A process reads only the announcement; the agent alone reads every report.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist

NO_STATE = -1  # the step of a process that has no training state yet


class Generation(NamedTuple):
    """The processes that train together; number 0 is before the first."""

    number: int = 0
    members: Sequence[int] = ()
    machines: Sequence[int] = ()  # of each member
    started: bool = False  # a member with state has joined: the generation before is over
    steps: Sequence[int] = ()  # of each member as it joined; empty until all have


class Member(NamedTuple):
    """What a process reports to the agent."""

    wants: int = 0  # the process wants this generation or a later one
    joined: int = 0  # the last generation that the process has joined
    step: int = NO_STATE  # number of finished steps as it joined
    max_world_size: int = 0  # how many ranks can use its state; 0 while it has none to share
    failure: Any = None  # [step, text] of the exception that ended the process
    wrong: bool = False  # the exception says that this process computes wrongly


class JobStore:
    """The messages between the agent and its processes, in a store that all of them reach."""

    def __init__(self, store: "FileStore | dist.Store") -> None:
        self._store = store

    @property
    def generation(self) -> Generation:
        return Generation(*json.loads(self._store.get("generation")))

    def announce(self, generation: Generation) -> None:
        self._store.set("generation", json.dumps(generation))

    def member(self, number: int) -> Member:
        return Member(*json.loads(self._store.get(f"member {number}")))

    def say(self, number: int, member: Member) -> None:
        """Writes the report of process `number`. The agent writes an empty one before the start."""
        self._store.set(f"member {number}", json.dumps(member))
        self._store.get(f"member {number}")  # the reply confirms the arrival: it may exit


class FileStore:
    """A folder as a store: the agent of a single machine does not import torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        part = self._folder / f"{key}.part"
        part.write_text(value)
        part.replace(self._folder / key)  # atomic

    def get(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()
