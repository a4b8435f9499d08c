"""The parent of ranks, with real processes: their places, their signals, and several machines."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

import ddp_from_scratch as ddp
from ddp_from_scratch import UsageError, start_ranks
from ddp_from_scratch.launch import agent
from ddp_from_scratch.launch.start import _pass_on
from tests.support.failing_run import Run


def shell(script, *arguments):
    """A rank that is a shell: `$RANK` is its number, `$PPID` its parent, `$1` an argument."""
    return ["sh", "-c", script, "rank", *map(str, arguments)]


def wait_until_there(*paths):
    return "; ".join(f'while [ ! -e "{path}" ]; do sleep 0.02; done' for path in paths)


@pytest.mark.program
def test_ranks_are_told_their_place_and_get_two_signals_of_a_terminal(tmp_path, capfd):
    # Neither ends at the first one, and rank 0 sends the second when both have got it.
    script = (
        'place="$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK"; '
        'folder=$(dirname "$DDP_RENDEZVOUS_FILE"); cd "$1"; trap "touch saved$RANK" TERM; '
        '(echo "$place"; echo "$folder"; stat -c %a "$folder") > $RANK; '
        "touch ready$RANK; "
    )
    tell = f"{wait_until_there('ready0', 'ready1')}; kill -INT $PPID; "
    tell += f"{wait_until_there('saved0', 'saved1')}; kill -INT $PPID"
    script += f'if [ "$RANK" = 0 ]; then {tell}; fi; while :; do sleep 0.1; done'
    assert start_ranks(shell(script, tmp_path), [2], bind="none") == 130
    assert {"saved0", "saved1"} <= {file.name for file in tmp_path.iterdir()}
    assert capfd.readouterr().err == "stopping all ranks; once more ends them at once\n"
    told = [(tmp_path / rank).read_text().splitlines() for rank in "01"]
    (folder,) = {folder for _, folder, *_ in told}  # private, and gone with its run
    assert told == [[f"{r} 2 {r} 2 0", folder, "700"] for r in "01"]
    assert not Path(folder).exists()


@pytest.mark.program
def test_a_stopped_process_is_known_by_its_state():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not agent._is_stopped(process)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert agent._is_stopped(process)
        process.kill()


RULE = 74 * "-"
REPORT = f"""{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-host-1@1,0]
   Exit code:    %d
{RULE}
"""


@pytest.mark.parametrize(
    ("stopping", "said", "passed_on"),
    [
        (True, [f"a\n{REPORT % 138}b\n"], "a\nb\n"),
        (True, ["a\n", f"{RULE}\n", "prterun noticed signal 10\n", f"{RULE}\n", "b\n"], "a\nb\n"),
        (True, [f"{RULE}\nof the program\n", "no end"], f"{RULE}\nof the program\nno end"),
        (False, [f"{RULE}\n", REPORT % 1], f"{RULE}\n{REPORT % 1}"),
    ],
)
def test_mpiruns_own_messages_are_left_out_after_a_stop(stopping, said, passed_on, capfd):
    read, write = os.pipe()
    thread = threading.Thread(target=_pass_on, args=[read, Mock(is_stopping=stopping)])
    thread.start()
    for text in said:
        os.write(write, text.encode())
    os.close(write)
    thread.join()
    assert capfd.readouterr().err == passed_on


PARENT = """
import sys
import threading
from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch.rank_process import run_to_exit
counts, node_rank, port, *command = sys.argv[1:]
at = [*map(int, counts.split(","))], int(node_rank), "127.0.0.1", int(port), 60.0
run_to_exit(lambda: start_ranks(command, *at))
"""


@pytest.mark.slow
def test_a_failure_on_one_machine_ends_the_others(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK"
    script = f'touch "$1/{place}"; if [ "$RANK" = 2 ]; then '
    places = ["0 of 3, 0 of 1 on 0", "1 of 3, 0 of 2 on 1", "2 of 3, 1 of 2 on 1"]
    script += wait_until_there(*(f"$1/{place}" for place in places[:2]))
    script += "; kill -KILL $$; fi; exec sleep 60"
    first, second = (
        Run(
            *(sys.executable, "-c", PARENT, "1,2", node_rank, port, *shell(script, tmp_path)),
            DDP_SECRET="known to all machines",
        )
        for node_rank in "01"
    )
    with first, second:
        second.wait()
        first.wait(10.0)
        first.assert_nobody_left()
        second.assert_nobody_left()
        told = "rank 2 was killed by SIGKILL"
        assert (second.wait(), second.err) == (137, f"{told}; all other ranks were stopped\n")
        assert (first.wait(), first.err) == (1, f"stopped: machine 1: {told}\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == places


@pytest.mark.parametrize("start", [start_ranks, ddp.start_mpirun])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_part_of_a_ranks_variables_raises(monkeypatch, start, name):
    """Each process of a job that is started so would train alone."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "2")
    with pytest.raises(UsageError, match=f"the environment has {name}=2 and no "):
        start(*((1, ["true"]) if start is ddp.start_mpirun else (["true"], [1])))
