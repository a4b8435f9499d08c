"""Ranks that may be lost, as processes: their places, and what they and their parent share.

What the parent decides is in `test_decisions.py`.
"""

import sys
from pathlib import Path

import pytest

from ddp_from_scratch import UsageError, start_ranks
from ddp_from_scratch.launch.board import NO_STATE, Board

# `out` is the test's folder; a process leaves what it saw in a file there.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from ddp_from_scratch.launch.board import Board

board, me = Board(Path(os.environ["DDP_BOARD"])), int(os.environ["DDP_MEMBER"])
out = Path(sys.argv[1])

def generation(number):
    while board.generation < number:
        time.sleep(0.005)
    return board.members(number)

def note(what):
    (out / f"{what}-{me}").touch()

def seen(what, member):
    while not (out / f"{what}-{member}").exists():
        time.sleep(0.005)
"""


def start(out: Path, program: str, nproc: int = 3, max_failures: int = 3) -> int:
    # Through a shell, so that the processes need not wait for one that imports torch.
    command = ["sh", "-c", 'exec "$0" -c "$1" "$2"', sys.executable, PRELUDE + program, str(out)]
    return start_ranks(command, [nproc], max_failures=max_failures)


def notes(out: Path) -> list[str]:
    return sorted(file.name for file in out.iterdir())


def test_a_board_keeps_what_each_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(tmp_path, capacity=3)
    other = Board(tmp_path)
    assert (other.generation, other.step(2)) == (0, 0)
    board.announce([0, 2], [0, 0])
    assert (other.generation, other.members(1)) == (1, [0, 2])
    assert not board.has_arrived(2, 1)
    other.arrive(2, 1, NO_STATE)
    assert board.has_arrived(2, 1)
    assert not board.has_arrived(2, 2)
    assert not board.has_arrived(0, 1)
    assert board.step(2) == NO_STATE
    other.ask(2, 2)
    assert board.asks(2)
    assert not board.asks(0)
    board.announce([0, 2], [0, 0])
    assert not board.asks(2)
    other.note_state(0, 4)
    assert board.has_state(0)
    assert not board.has_state(2)
    assert board.failure(1) is None
    write = Path.write_text

    def slowly(file: Path, text: str) -> int:
        write(file, text[:1])
        assert board.failure(1) is None  # another process looks just then
        return write(file, text)

    monkeypatch.setattr(Path, "write_text", slowly)
    other.note_failure(1, 5, "ValueError: no")
    assert board.failure(1) == (5, "ValueError: no")


def test_each_process_begins_alone(tmp_path: Path) -> None:
    program = """
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
note("-".join(place))
assert Path(os.environ["DDP_RENDEZVOUS_FILE"]).name == f"alone-{me}"
assert generation(1) == [0, 1, 2]
"""
    assert start(tmp_path, program) == 0
    assert notes(tmp_path) == [f"0-1-0-1-{member}" for member in range(3)]


def test_the_others_go_on_and_another_process_joins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
if me == 1:
    generation(1)
    os.kill(os.getpid(), signal.SIGKILL)
if me < 3:
    assert generation(2) == [0, 2], generation(2)
    note("went on")
else:
    seen("went on", 0); seen("went on", 2)
    board.ask(me, board.generation + 1)
assert generation(3) == [0, 2, 3], generation(3)
note("joined")
"""
    assert start(tmp_path, program) == 0
    assert notes(tmp_path) == ["joined-0", "joined-2", "joined-3", "went on-0", "went on-2"]
    said = (
        "process 1 was killed by SIGKILL: going on with 2 ranks; starting another (failure 1 of 3)"
    )
    assert capfd.readouterr().err == f"{said}\n"


def test_a_count_below_0_is_refused() -> None:
    with pytest.raises(UsageError, match="max_failures must be 0 to 50,000, got -1"):
        start_ranks(["true"], [2], max_failures=-1)
