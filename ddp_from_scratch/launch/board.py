"""Memory that the supervisor of a job that goes on shares with its ranks.

Each group of ranks that train together is a *generation*. The supervisor alone announces one: it
knows which processes live, so two halves of a job can never go on side by side.

    supervisor   writes the members of generation g to a file, then g to the board
    a process    writes its step, then that it has arrived at g; opens a group when all members have
                 asks for the next generation: when it lost a peer, or wants to join

A process is known by its number, which no later one gets. Each machine has a board of its own, and
supervisors copy the words of one to the other (`other_machines.py`).
"""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Words of 8 bytes, each written by one process: the generation, then for every process these.
_ASKS, _ARRIVED, _STEP, _STATE = range(4)
_EACH = 4
_WORD = 8

NO_STATE = -1  # the step of a process that has nothing to go on with


class Board:
    """The board in this folder, of at most so many processes; `capacity` makes a new one.

    Attributes:
        folder: where it is.
        processes: how many have been started; the supervisor's own.
    """

    def __init__(self, folder: Path, capacity: int | None = None) -> None:
        self.folder, self.processes = folder, 0
        if capacity is not None:
            (folder / "board").write_bytes(bytes(_WORD * (1 + _EACH * capacity)))
        with (folder / "board").open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    # The supervisor's ---------------------------------------------------------------------------

    def announce(
        self, members: Sequence[int], machines: Sequence[int], generation: int | None = None
    ) -> None:
        """Begins a generation with these processes, on these machines; by default the next one."""
        number = self.generation + 1 if generation is None else generation
        # Written first: who reads the number finds the file.
        self._members_file(number).write_text(json.dumps([list(members), list(machines)]))
        self._words[0] = number

    def words(self, member: int) -> list[int]:
        """All that a process says of itself, to be copied to another machine's board."""
        at = self._at(member, 0)
        return self._words[at : at + _EACH].tolist()

    def copy_words(self, member: int, words: Sequence[int]) -> None:
        """Writes what a process of another machine says of itself."""
        # In their order: a step is there before the arrival that it belongs to.
        for word in (_STEP, _ARRIVED, _ASKS, _STATE):
            self._words[self._at(member, word)] = words[word]

    def asks(self, member: int) -> bool:
        """True if a process waits for a generation that has not been announced."""
        return self._words[self._at(member, _ASKS)] > self.generation

    def failure(self, member: int) -> tuple[int, str] | None:
        """The step at which a process ended with an exception, and its text; None if it did not."""
        file = self._failure_file(member)
        if not file.exists():
            return None
        step, text = json.loads(file.read_text())
        return step, text

    def all_words(self) -> list[list[int]]:
        """Those of every process that was started, by its number."""
        return [self.words(member) for member in range(self.processes)]

    # A process's --------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The last one that was announced; 0 before the first."""
        return self._words[0]

    def members(self, generation: int) -> list[int]:
        """The processes of a generation that was announced."""
        members: list[int] = self._announced(generation)[0]
        return members

    def machines(self, generation: int) -> list[int]:
        """The machine of each of its processes."""
        machines: list[int] = self._announced(generation)[1]
        return machines

    def ask(self, member: int, generation: int) -> None:
        """Asks for this generation, or a later one."""
        self._words[self._at(member, _ASKS)] = generation

    def arrive(self, member: int, generation: int, step: int) -> None:
        """Says that this process comes to a generation, and how many steps it has finished."""
        self._words[self._at(member, _STEP)] = step
        # Last: the step of a process that has arrived does not change.
        self._words[self._at(member, _ARRIVED)] = generation

    def has_arrived(self, member: int, generation: int) -> bool:
        """True if this process has come to this generation."""
        return self._words[self._at(member, _ARRIVED)] >= generation

    def step(self, member: int) -> int:
        """The steps that a process had finished when it arrived; NO_STATE if it has none."""
        return self._words[self._at(member, _STEP)]

    def note_state(self, member: int, most_ranks: int) -> None:
        """Says that this process has a state with which others may go on, and how many can."""
        self._words[self._at(member, _STATE)] = most_ranks

    def has_state(self, member: int) -> bool:
        """True once a process has a state with which others may go on."""
        return self.most_ranks(member) > 0

    def most_ranks(self, member: int) -> int:
        """The most ranks that a process's state can be used by; 0 until it has one."""
        return self._words[self._at(member, _STATE)]

    def note_failure(self, member: int, step: int, text: str) -> None:
        """Leaves the exception that ends this process."""
        file = self._failure_file(member)
        # Whole as soon as it is there: the supervisor of another machine looks while it is written.
        part = file.with_suffix(".part")
        part.write_text(json.dumps([step, text]))
        part.replace(file)

    def _at(self, member: int, word: int) -> int:
        return 1 + _EACH * member + word

    def _announced(self, generation: int) -> Any:
        return json.loads(self._members_file(generation).read_text())

    def _members_file(self, generation: int) -> Path:
        return self.folder / f"members-{generation}"

    def _failure_file(self, member: int) -> Path:
        return self.folder / f"failure-{member}"
