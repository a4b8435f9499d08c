"""Forked ranks find what a new Python would, end as it would, and end with their server."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

import pytest

from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch.fork_server import ForkServer, can_fork
from tests.support.tiers import slow

pytestmark = pytest.mark.skipif(
    not can_fork([sys.executable, "-c", ""]), reason="ranks are forked on Linux alone"
)

TELL = """
import os, signal, sys, threading
print(__name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals())
print(sys.argv, sys.path, sys.orig_argv[1:])
print(sorted(os.environ.items()), os.getsid(0) == os.getpid())
print([os.readlink(f"/proc/self/fd/{number}") for number in range(3)])
print([signal.getsignal(number) for number in signal.Signals if number not in (9, 19)])
print(threading.active_count(), len(os.listdir("/proc/self/task")))
"""
# Classes of the program are pickled by the name __main__, also from its atexit handlers.
PICKLES = """
import atexit, pickle
class Own:
    pass
copy = pickle.loads(pickle.dumps(Own()))
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(copy))) is Own))
"""
PROGRAMS = {
    "program": TELL,
    "pickles": PICKLES,
    "exits": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('a text')",
    "raises": "def fail():\n    raise ValueError('on purpose')\n\nfail()",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ends at once": "import os; os._exit(4)",
    "is wrong": "def",
}


def execute(command, environ):
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.slow
def test_a_rank_finds_what_a_new_python_would_and_ends_as_it(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    programs = [[f"{name}.py"] for name in PROGRAMS]
    programs += [[str(tmp_path / "program.py")], ["-m", "program"], ["-c", TELL]]
    server = ForkServer([])
    try:
        for program in programs:
            command = [sys.executable, *program, "an argument"]
            assert can_fork(command)
            found = []
            for start in (server.start, execute):
                code = start(command, os.environ | {"RANK": "1"}).wait()
                found.append((code, *capfd.readouterr()))
            assert found[0] == found[1], command
            assert found[0] != (0, "", "")
        rank = server.start([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
        rank.send_signal(signal.SIGINT)  # mostly before the fork
        assert rank.wait() == -signal.SIGINT
    finally:
        server.kill()


@pytest.mark.program
def test_a_rank_that_is_killed_before_its_fork_leaves_the_server_to_others():
    """As on an elastic machine that stood still while its server imported torch."""
    server = ForkServer([])
    try:
        first = server.start([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
        first.send_signal(signal.SIGKILL)
        assert (first.pid, first.wait()) == (None, -signal.SIGKILL)
        second = server.start([sys.executable, "-c", "import sys; sys.exit(3)"], os.environ)
        assert second.wait() == 3
        assert server.returncode is None
        ended = os.pidfd_open(first.pid)
        assert wait([ended], 10.0), "the withdrawn rank still runs"
        os.close(ended)
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_with_threads_executes_its_ranks(tmp_path, monkeypatch):
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "with_threads.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-c", "import sys; sys.exit('torch' in sys.modules)"]
    assert start_ranks(command, [1], preload=["with_threads"]) == 0


# Each rank's parent is the fork server.
KILL = "import os, signal, sys; assert 'torch' in sys.modules\n"
KILL += "os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
TOLD = "the fork server, from which all ranks here were started, was killed by SIGKILL\n"


@pytest.mark.program
@pytest.mark.parametrize("max_restarts", [slow(None), 3])
def test_a_killed_fork_server_ends_the_job_and_a_line_says_so(max_restarts, capfd):
    code = start_ranks([sys.executable, "-c", KILL], [2], max_restarts=max_restarts, preload=())
    assert (code, capfd.readouterr().err) == (137, TOLD)


@pytest.mark.slow
def test_a_fork_server_that_cannot_import_is_one_error(capfd):
    assert start_ranks([sys.executable, "-c", KILL], [2], preload=["no_such"]) == 1
    err = capfd.readouterr().err
    assert err.count("ModuleNotFoundError") == 1
    assert err.endswith("ModuleNotFoundError: No module named 'no_such'\n")


DRAWS = """
import os, pathlib, random, sys, time
import numpy, torch
file = pathlib.Path(sys.argv[1])
file.with_suffix(".new").write_text(f"{random.random()} {numpy.random.rand()} {torch.rand(1)}")
file.with_suffix(".new").rename(file)
time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_draw_numbers_of_their_own_and_end_with_their_server(tmp_path):
    server = ForkServer(["numpy"])
    files = [tmp_path / rank for rank in "01"]
    command = [sys.executable, "-c", DRAWS]
    ranks = [server.start([*command, str(file)], os.environ) for file in files]
    while not all(file.exists() for file in files):
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.01)
    ours, theirs = (file.read_text().split() for file in files)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [False, False, True]
    ranks[0].send_signal(signal.SIGTERM)
    assert ranks[0].wait() == -signal.SIGTERM
    assert ranks[1].poll() is None
    pid = ranks[1].pid
    server.kill()
    assert ranks[1].wait() == -signal.SIGKILL
    while os.path.exists(f"/proc/{pid}"):  # the system's signal is on its way
        time.sleep(0.01)


@pytest.mark.parametrize("command", [["sh", "-c", "exit 0"], [], ["-u", "x.py"], ["-"]], ids=str)
def test_other_commands_are_executed(command):
    assert not can_fork(command if "sh" in command else [sys.executable, *command])
