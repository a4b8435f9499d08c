"""The parent of ranks, with real processes: their places, their signals, and several machines.

What it decides is in `test_decisions.py`.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch import watch
from tests.support.failing_run import Run

SOON_S = 10.0


def shell(script: str, *arguments: str | Path) -> list[str]:
    """A rank that is a shell: `$RANK` is its number, `$PPID` its parent, `$1` an argument."""
    return ["sh", "-c", script, "rank", *map(str, arguments)]


def wait_until_there(path: str) -> str:
    return f'while [ ! -e "{path}" ]; do sleep 0.02; done'


def test_each_rank_is_told_its_place_and_meets_in_a_private_folder(tmp_path: Path) -> None:
    told = (
        'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK"; '
        'folder=$(dirname "$DDP_RENDEZVOUS_FILE"); echo "$folder"; stat -c %a "$folder"; '
        "readlink /proc/self/fd/0"
    )
    assert start_ranks(shell(f'({told}) > "$1/$RANK"', tmp_path), [3]) == 0
    folders = set()
    for rank in range(3):
        place, folder, mode, stdin = (tmp_path / str(rank)).read_text().splitlines()
        assert place == f"{rank} 3 {rank} 3 0"
        assert (mode, stdin) == ("700", "/dev/null")
        folders.add(folder)
    assert len(folders) == 1
    assert not Path(folders.pop()).exists()


def test_the_first_signal_lets_ranks_save_and_the_second_kills_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Neither ends at the first one, and rank 0 sends the second when both have got it.
    save = 'trap "touch $1/saved$RANK" TERM; touch $1/ready$RANK'
    both = "; ".join(wait_until_there(f"$1/ready{rank}") for rank in range(2))
    tell = f"{both}; kill -INT $PPID; {wait_until_there('$1/saved0')}; "
    tell += f"{wait_until_there('$1/saved1')}; kill -INT $PPID"
    script = f'{save}; if [ "$RANK" = 0 ]; then {tell}; fi; while :; do sleep 0.1; done'
    assert start_ranks(shell(script, tmp_path), [2]) == 130
    assert {"saved0", "saved1"} <= {file.name for file in tmp_path.iterdir()}
    assert capfd.readouterr().err == "stopping all ranks; once more ends them at once\n"


def test_a_stopped_process_is_known_by_its_state() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not watch._is_stopped(process)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert watch._is_stopped(process)
        process.kill()


SECRET = "known to all machines"

# Several machines: each a parent of its own, on loopback ------------------------------------------

PARENT = """
import sys
from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch.rank_process import run_to_exit
*place, port, timeout, failures = eval(sys.argv[1])
at = *place, "127.0.0.1", port, timeout
run_to_exit(lambda: start_ranks(sys.argv[2:], *at, max_failures=failures))
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def machine(
    counts: list[int],
    node_rank: int,
    port: int,
    command: list[str],
    timeout: float = 60.0,
    secret: str | None = SECRET,
    max_failures: int | None = None,
) -> Run:
    arguments = repr((counts, node_rank, port, timeout, max_failures))
    program = (sys.executable, "-c", PARENT, arguments, *command)
    return Run(*program, **({} if secret is None else {"DDP_SECRET": secret}))


def test_two_machines_of_unequal_size(port: int) -> None:
    place = "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK"
    told = shell(f'echo "{place}"; exit 0')
    with machine([1, 2], 0, port, told) as first, machine([1, 2], 1, port, told) as second:
        assert [second.wait(), first.wait()] == [0, 0]
        assert first.text == "0 of 3, 0 of 1 on 0\n\n--- standard error:\n"
        assert sorted(second.out.splitlines()) == ["1 of 3, 0 of 2 on 1", "2 of 3, 1 of 2 on 1"]
        assert second.err == ""


def test_a_failure_on_one_machine_ends_the_others(port: int) -> None:
    fail = shell('[ "$RANK" = 2 ] && kill -KILL $$; exec sleep 60')
    with machine([1, 2], 0, port, fail) as first, machine([1, 2], 1, port, fail) as second:
        second.wait()
        first.wait(SOON_S)
        first.assert_nobody_left()
        second.assert_nobody_left()
        told = "rank 2 was killed by SIGKILL"
        assert (second.wait(), second.err) == (137, f"{told}; all other ranks were stopped\n")
        assert (first.wait(), first.err) == (1, f"stopped: machine 1: {told}\n")


def test_the_end_of_machine_0_ends_the_others(port: int) -> None:
    wait = shell("echo here; exec sleep 60")
    with machine([1, 1], 0, port, wait) as first, machine([1, 1], 1, port, wait) as second:
        second.wait_for("here")
        first.signal(signal.SIGKILL)
        assert second.wait(SOON_S) == 1
        assert second.err.endswith("\nstopped: machine 0 no longer answers\n")  # after torch's word
