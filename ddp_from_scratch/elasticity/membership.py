"""This process among others that come and go: each generation of ranks has a group of its own."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ddp_from_scratch.elasticity.closing import (
    close_default_group,
    cut_when_broken,
    drop_tracebacks,
)
from ddp_from_scratch.launch.board import NO_STATE, Board
from ddp_from_scratch.launch.environment import BOARD, MACHINE_0, MEMBER
from ddp_from_scratch.waiting import look_for_lost_ranks
from ddp_from_scratch.world import World, replace_group

# Seconds that ranks which have all arrived may take to connect. One that dies meanwhile costs the
# others up to 5 times as much: gloo tries so often. Doubled after each failure, for slow machines.
_CONNECT_S = 0.5
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.001


@dataclass(frozen=True)
class Meeting:
    """What the ranks of a new generation have come with.

    Attributes:
        source: the first rank that has finished the most steps; None if none has a state.
        alike: True if all have finished as many, and so have the same state.
    """

    source: int | None
    alike: bool


class Membership:
    """The place of this process in its job's generations (`launch/board.py`).

    Each process begins in a group of its own, so that it can build its model without the others.

    Args:
        world: that of `process_group("gloo")`.
        most_ranks: that can share a step.
        timeout: seconds that a collective may take.

    Attributes:
        world: the present one.
        elastic: True if the job's supervisor replaces lost ranks; else there is one generation,
            which has been there from the start.
        took_over: True if this rank 0 came after another one.
    """

    def __init__(self, world: World, most_ranks: int, timeout: float) -> None:
        self.world, self._most_ranks = world, most_ranks
        self._timeout = timedelta(seconds=timeout)
        folder = os.environ.get(BOARD)
        self.elastic = folder is not None
        self._board = Board(Path(folder)) if folder is not None else None
        self._member = int(os.environ.get(MEMBER, "0"))
        self._generation = 0
        self._has_state = False
        self._connect_s = _CONNECT_S
        self.took_over = False

    @property
    def in_group(self) -> bool:
        """True while this process is in a generation's group."""
        return self._board is None or (self._generation > 0 and dist.is_initialized())

    @property
    def changed(self) -> bool:
        """True once a generation has followed upon another."""
        return self._generation > 1

    @property
    def is_over(self) -> bool:
        """True once a later generation was announced: somebody was lost, or wants to join."""
        return self._board is not None and self._board.generation > self._generation

    def meet(self, step: int) -> Meeting:
        """Opens the next generation's group. Collective, for its processes alone.

        Processes keep their order: rank 0 stays rank 0 as long as it lives.

        Args:
            step: the steps that this process has finished.
        """
        assert self._board is not None, "there is only one generation"
        if dist.is_initialized():
            self.leave()
        while True:
            generation, members = self._arrive(step if self._has_state else NO_STATE)
            # Equal on all, since no step changes after its process has arrived.
            steps = [self._board.step(member) for member in members]
            machines = self._board.machines(generation)
            rank = members.index(self._member)
            connect = timedelta(seconds=self._connect_s)
            try:
                store = self._store(generation, len(members))
                self.world = replace_group(self.world, store, rank, machines, connect)
            except RuntimeError as error:  # one of them died just now
                self._connect_s *= 2
                self.leave(error)
                self._ask_for_next(generation)
                continue
            self._connect_s = _CONNECT_S
            self._generation = generation
            assert dist.group.WORLD is not None, "it has just been opened"
            dist.group.WORLD.set_timeout(self._timeout)
            is_broken = partial(self._is_broken, generation, members)
            look_for_lost_ranks(is_broken)
            cut_when_broken(dist.group.WORLD, is_broken)
            last = max(steps)
            self.took_over = rank == 0 and (self._has_state or self._member > 0)
            source = None if last == NO_STATE else steps.index(last)
            return Meeting(source, alike=source is not None and min(steps) == last)

    def note_state(self) -> None:
        """Notes that this process has the state of its step, with which others may go on."""
        self._has_state = True
        if self._board is not None:
            self._board.note_state(self._member, self._most_ranks)

    def leave(self, error: BaseException | None = None) -> None:
        """Closes the group, so that peers that wait for this rank notice at once.

        Args:
            error: what it failed with; its traceback is dropped.
        """
        # The group ends with the last reference to it, and the frames of an error have many.
        drop_tracebacks(error)
        if dist.is_initialized():
            close_default_group()

    def lose(self, error: BaseException) -> None:
        """Leaves the group after a communication error, and asks for another one."""
        self.leave(error)
        self._ask_for_next(self._generation)

    def note_failure(self, step: int, error: BaseException) -> None:
        """Leaves the group, and a note of the exception that ends this process."""
        if self._board is not None:
            self._board.note_failure(self._member, step, f"{type(error).__name__}: {error}")
            self.leave()

    def _store(self, generation: int, members: int) -> dist.Store:
        """A new store, of a generation's members alone."""
        if MACHINE_0 not in os.environ:
            assert self._board is not None
            return dist.FileStore(str(self._board.folder / f"store-{generation}"), members)
        # The supervisors', on machine 0.
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)
        return dist.PrefixStore(f"generation {generation}", store)

    def _is_broken(self, generation: int, members: Sequence[int]) -> bool:
        """True once a rank of a generation has left its group."""
        assert self._board is not None
        if self._board.generation == generation:
            return False
        living = self._board.members(self._board.generation)
        return any(
            member not in living or self._board.has_arrived(member, generation + 1)
            for member in members
        )

    def _arrive(self, step: int) -> tuple[int, list[int]]:
        """Waits until all processes of the last generation have come; returns it and them."""
        assert self._board is not None
        while True:
            generation = self._board.generation
            members = self._board.members(generation) if generation else []
            if generation <= self._generation or self._member not in members:
                self._ask_for_next(generation)
                continue
            self._board.arrive(self._member, generation, step)
            while self._board.generation == generation:
                if all(self._board.has_arrived(member, generation) for member in members):
                    return generation, members
                time.sleep(_POLL_S)

    def _ask_for_next(self, generation: int) -> None:
        """Waits for a generation after this one, and has it announced where needed."""
        assert self._board is not None
        self._board.ask(self._member, generation + 1)
        while self._board.generation <= generation:
            time.sleep(_POLL_S)
