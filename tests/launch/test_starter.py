"""A rank behind a wrapper process: it runs, and it ends with whoever started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_from_scratch.common import process
from ddp_from_scratch.common.process import Process
from ddp_from_scratch.launch import ancestors
from tests.support.failing_run import Run
from tests.support.tiers import slow

pytestmark = [
    pytest.mark.program,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

END_S = 15.0  # a hang, not the time that it takes

# Without torch, so that it starts at once.
RANK = """
import os, sys, time
from ddp_from_scratch.launch.rank_process import die_with_launcher
die_with_launcher()
print("rank", os.getpid(), "runs under", os.getppid(), flush=True)
until = time.monotonic() + 60
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.02)
sys.exit(3)
"""
START = "import sys; from ddp_from_scratch import start_ranks; sys.exit(start_ranks({}, [1]))"
STARTERS = {
    "start_ranks": [sys.executable, "-c", START.format("sys.argv[1:]")],
    "torchrun": ["torchrun", "--nproc-per-node", "1", "--no-python"],
    "mpirun": ["mpirun", "-n", "1"],
}
WRAPPERS = {
    "timeout": ["timeout", "60"],
    "bash": ["bash", "-c", '"$@"; exit $?', "bash"],
    "two": ["timeout", "60", "bash", "-c", '"$@"; exit $?', "bash"],
    "none": [],
}


@pytest.fixture
def program(tmp_path):
    """A rank that ends with code 3 once the file beside it exists."""
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return [sys.executable, str(file), str(tmp_path / "end")]


def numbers_in(run):
    run.wait_for("runs under")
    line = next(line for line in run.out.splitlines() if "runs under" in line).split()
    return int(line[1]), int(line[-1])


@pytest.mark.parametrize(
    ("starter", "wrapper"),
    [
        ("start_ranks", "timeout"),
        ("start_ranks", "two"),
        ("mpirun", "bash"),
        slow("torchrun", "timeout"),
    ],
)
def test_a_rank_behind_a_wrapper_ends_with_its_own_code(starter, wrapper, program):
    Path(program[-1]).touch()
    with Run(*STARTERS[starter], *WRAPPERS[wrapper], *program) as run:
        code = run.wait()
        assert "runs under" in run.out, run.text
        assert code == (1 if starter == "torchrun" else 3), run.text  # torchrun's is always 1


@pytest.mark.parametrize(
    ("starter", "wrapper"),
    [
        ("start_ranks", "none"),
        ("start_ranks", "bash"),
        ("start_ranks", "two"),
        ("mpirun", "two"),
        slow("torchrun", "bash"),
    ],
)
def test_a_rank_ends_when_its_launcher_is_killed(starter, wrapper, program):
    with Run(*STARTERS[starter], *WRAPPERS[wrapper], *program) as run:
        run.wait_for("runs under")
        run.signal(signal.SIGKILL)
        run.wait()
        run.assert_nobody_left(END_S)
        if starter == "start_ranks" and wrapper != "none":  # the others take the output with them
            told = f"process {run.process.pid}, which started it, is gone"
            assert f"rank 0 was ended: {told}\n" in run.err


@pytest.mark.parametrize("wrapper", ["timeout", "bash"])
def test_a_rank_ends_when_its_wrapper_is_killed(wrapper, program):
    with Run(*STARTERS["start_ranks"], *WRAPPERS[wrapper], *program) as run:
        _, parent = numbers_in(run)
        assert parent != run.process.pid
        os.kill(parent, signal.SIGKILL)
        assert run.wait(END_S) == 128 + signal.SIGKILL
        run.assert_nobody_left(END_S)


def test_a_rank_that_is_no_descendant_ends_with_its_launcher(program):
    # The rank's parent is gone before the rank looks; its launcher still waits for the wrapper.
    script = '("$@" &); while :; do sleep 0.1; done'
    with Run(*STARTERS["start_ranks"], "sh", "-c", script, "sh", *program) as run:
        rank, parent = numbers_in(run)
        assert Process.of(rank).is_alive()
        assert parent not in run.processes()
        run.signal(signal.SIGKILL)
        while rank in run.processes():
            time.sleep(0.02)


def starts(program, starter):
    Path(program[-1]).touch()
    environ = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "DDP_PARENT_PID": starter}
    return subprocess.run(program, env=environ, capture_output=True, text=True, timeout=END_S)


def test_a_launcher_that_is_gone_before_the_rank_looks(program):
    with subprocess.Popen(["sleep", "60"]) as process:
        starter = Process.of(process.pid)
        assert starter.is_alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not starter.is_alive()  # though nobody has waited for it
    ended = starts(program, str(starter))
    told = f"rank 1 was ended: process {starter.pid}, which started it, is gone\n"
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, told)
    # Another process with the same number.
    later = ancestors.own()._replace(start="1")
    assert starts(program, str(later)).returncode == -signal.SIGKILL


def test_a_launcher_outside_of_the_container_is_not_looked_for(program):
    # Its number means another process here, or none.
    elsewhere = Process(2**22, "1", "pid:[1]")
    assert starts(program, str(elsewhere)).returncode == 3


def test_a_process_without_a_launcher_is_left_alone(program):
    Path(program[-1]).touch()
    with Run("bash", "-c", '"$@"; exit $?', "bash", *program) as run:
        assert run.wait(END_S) == 3


def test_without_proc_a_process_is_known_by_its_number(monkeypatch):
    for module in (ancestors, process):
        monkeypatch.setattr(module, "stat_fields", lambda pid: [])
    with subprocess.Popen(["sleep", "60"]) as other:
        found = Process.of(other.pid)
        assert found.start == ""
        assert found.is_alive()
        other.kill()
    assert not found.is_alive()
    assert list(ancestors.ancestors()) == [os.getppid()]
    assert Process.parse(str(found)) == found
    assert Process.parse("12") is Process.parse("a:b:c") is None
