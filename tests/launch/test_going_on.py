"""The parent of ranks that may be lost: generations, replacements, and when the job ends."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ddp_from_scratch import UsageError, start_ranks
from ddp_from_scratch.launch import watch
from ddp_from_scratch.launch.board import NO_STATE, Board
from ddp_from_scratch.launch.going_on import GoingOnWatch

# `out` is the test's folder; a process leaves what it saw in a file there.
PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
from ddp_from_scratch.launch import watch
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


def test_a_machine_joins_where_there_are_shards_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(tmp_path, capacity=9)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(GoingOnWatch, "_start", lambda self, environ: started.append(environ))
    job = GoingOnWatch(["true"], lambda member: {"DDP_MEMBER": str(member)}, [2], 0, board, ())
    monkeypatch.setattr(job, "_children", [None, None])
    # Nobody has a state that it could get.
    assert job._let_in(1, 1) == "the job can use 0 ranks, and has 2"
    board.note_state(1, 4)
    assert job._let_in(1, 3) == "the job can use 4 ranks, and has 2"
    assert started == []
    assert job._let_in(1, 2) is None
    assert [environ["DDP_MEMBER"] for environ in started] == ["2", "3"]
    assert job._let_in(2, 1) == "the job can use 4 ranks, and has 4"


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


def test_a_process_that_lost_a_peer_asks_for_the_next_generation(tmp_path: Path) -> None:
    program = """
generation(1)
if me == 2:
    board.ask(me, 2)
assert generation(2) == [0, 1, 2]
"""
    assert start(tmp_path, program) == 0


def test_a_process_that_ended_well_is_not_missed(tmp_path: Path) -> None:
    program = """
generation(1)
board.arrive(me, 1, 0)
board.note_state(me, 8)
if me == 0:
    sys.exit(0)
if me == 1:
    seen("looked", 2)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3)
assert board.generation == 1
note("looked")
assert generation(2) == [2], generation(2)
"""
    assert start(tmp_path, program, max_failures=0) == 0


def test_a_process_that_ended_well_is_not_waited_for(tmp_path: Path) -> None:
    program = """
board.note_state(me, 8)
generation(1)
board.arrive(me, 1, 0)
if me == 0:
    seen("asked", 1)
    generation(2)
    sys.exit(0)  # it does not arrive
board.ask(me, 2)
note("asked")
assert generation(3) == [1, 2], generation(3)
"""
    assert start(tmp_path, program) == 0


def test_the_job_is_over_when_all_that_have_trained_are(tmp_path: Path) -> None:
    program = """
generation(1)
if me < 2:
    board.note_state(me, 8)
    note("trained")
    if me == 0:
        seen("trained", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    seen("started", 2)
else:
    note("started")
    board.ask(me, 2)
    time.sleep(60)
"""
    assert start(tmp_path, program, nproc=2) == 0


def test_a_users_mistake_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, "sys.exit(2) if me == 1 else time.sleep(60)") == 2
    assert capfd.readouterr().err == ""


def test_the_same_exception_at_the_same_step_is_a_bug(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
if me in (1, 3, 4):
    generation(1)
    board.arrive(me, 1, 0)
    board.note_failure(me, 6 if me == 1 else 7, "ValueError: no")
    note("failed")
    sys.exit(1)
time.sleep(60)
"""
    assert start(tmp_path, program) == 1
    # Not the first two: they failed at different steps.
    assert notes(tmp_path) == ["failed-1", "failed-3", "failed-4"]
    *_, last = capfd.readouterr().err.splitlines()
    assert last == "step 8 failed again with ValueError: no; all other ranks were stopped"


def test_a_program_that_fails_at_its_start_is_not_started_for_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, "sys.exit(5)", nproc=1) == 5
    assert start(tmp_path, "time.sleep(60) if me == 0 else sys.exit(5)", nproc=2) == 5
    *_, last = capfd.readouterr().err.splitlines()
    assert last == "the start failed again with exit code 5; all other ranks were stopped"


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (5, 2)])
def test_who_cannot_join_does_not_end_the_others(
    code: int, starts: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"""
if me < 2:
    generation(1)
    board.arrive(me, 1, 0)
    board.note_state(me, 8)
    note("trained")
    if me == 0:
        seen("trained", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    seen("failed", {1 + starts})
    time.sleep(0.3)
    note("ended")
else:
    note("failed")
    sys.exit({code})
"""
    assert start(tmp_path, program, nproc=2, max_failures=9) == 0
    failed = [f"failed-{2 + index}" for index in range(starts)]
    assert notes(tmp_path) == ["ended-1", *failed, "trained-0", "trained-1"]
    *_, last = capfd.readouterr().err.splitlines()
    assert last == (
        f"process {1 + starts} ended with exit code {code} before it had joined; no other is "
        f"started in its place"
    )


def test_after_too_many_failures_nothing_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
generation(1)
if me in (1, 3):
    board.arrive(me, 1, 0)
    sys.exit(9)
assert generation(2) == [0, 2]
seen("gone", 0) if me else (time.sleep(0.5), note("gone"))
note("ended")
"""
    assert start(tmp_path, program, max_failures=1) == 0
    assert notes(tmp_path) == ["ended-0", "ended-2", "gone-0"]
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(
        "process 1 ended with exit code 9: going on with 2 ranks; starting another"
    )
    assert second == (
        "process 3 ended with exit code 9: going on with 2 ranks; no replacement is left of 1"
    )


def test_the_job_ends_with_the_last_that_has_trained(tmp_path: Path) -> None:
    program = """
if me < 2:
    generation(1)
    board.note_state(me, 8)
    seen("started", 2) if me else None
    if me == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)
note("started")
time.sleep(60)
"""
    assert start(tmp_path, program, nproc=2) == 128 + signal.SIGTERM


def test_a_stopped_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "STOPPED_S", 0.2)
    program = """
generation(1)
if me == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
assert generation(2) == [0, 2]
"""
    assert start(tmp_path, program, max_failures=0) == 0
    assert "process 1 was killed by SIGKILL: going on with 2 ranks" in capfd.readouterr().err


def test_a_signal_stops_all_without_replacing_any(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
signal.signal(signal.SIGTERM, lambda *_: (note("stopped"), sys.exit(143)))
note("ready")
time.sleep(60)
"""

    def stop() -> None:
        while len(notes(tmp_path)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert start(tmp_path, program) == 143
    thread.join()
    assert notes(tmp_path) == [f"{what}-{r}" for what in ("ready", "stopped") for r in range(3)]
    assert capfd.readouterr().err == "stopping all ranks; once more ends them at once\n"


def test_a_count_below_0_is_refused() -> None:
    with pytest.raises(UsageError, match="max_failures must be 0 to 50,000, got -1"):
        start_ranks(["true"], [2], max_failures=-1)
