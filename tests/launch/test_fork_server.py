"""Forked ranks find what a new Python would, end as it would, and end with their server."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from ddp_from_scratch import start_ranks
from ddp_from_scratch.launch.fork_server import ForkServer, can_fork

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


def assert_alike(commands: Iterable[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    """Forked, each command prints what it prints as a new process, and ends with the same code."""
    server = ForkServer([])
    try:
        for command in commands:
            assert can_fork(command)
            found = []
            for start in (server.start, execute):
                code = start(command, os.environ | {"RANK": "1"}).wait()
                found.append((code, *capfd.readouterr()))
            assert found[0] == found[1], command
            assert found[0] != (0, "", "")
    finally:
        server.kill()


def execute(command: list[str], environ: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)


def test_a_rank_finds_what_a_new_python_would(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(TELL)
    programs = [[str(tmp_path / "program.py")], ["program.py"], ["-m", "program"], ["-c", TELL]]
    commands = ([sys.executable, *program, "an argument"] for program in programs)
    assert_alike(commands, capfd)


ENDS = {
    "returns": "print('done')",
    "exits": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('a text')",
    "raises": "def fail():\n    raise ValueError('on purpose')\n\nfail()",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ends at once": "import os; os._exit(4)",
    "registers": "import atexit; atexit.register(print, 'at exit')",
    "is wrong": "def",
}


def test_a_rank_ends_as_a_new_python_would(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = []
    for name, text in ENDS.items():
        (tmp_path / f"{name}.py").write_text(text)
        commands.append([sys.executable, str(tmp_path / f"{name}.py")])
    assert_alike(commands, capfd)


def test_ranks_draw_different_numbers(tmp_path: Path) -> None:
    text = "import os, sys, random, numpy, torch\nopen(sys.argv[1] + os.environ['RANK'], 'w').write"
    text += "(f'{random.random()} {numpy.random.rand()} {torch.rand(1).item()}')"
    assert start_ranks([sys.executable, "-c", text, f"{tmp_path}/"], [2], preload=["numpy"]) == 0
    ours, theirs = ((tmp_path / name).read_text().split() for name in "01")
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [False, False, True]


@pytest.mark.parametrize("threads", [False, True])
def test_a_server_with_threads_executes_its_ranks(
    threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import threading\n"
    if threads:
        text += "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "with_threads.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-c", "import sys; sys.exit('torch' in sys.modules)"]
    assert start_ranks(command, [2], preload=["with_threads"]) == (0 if threads else 1)


def test_a_server_that_cannot_import_is_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert start_ranks([sys.executable, "-c", ""], [2], preload=["no_such_module"]) == 1
    err = capfd.readouterr().err
    assert err.count("ModuleNotFoundError: No module named 'no_such_module'") == 1


def test_ranks_end_with_their_server(tmp_path: Path) -> None:
    server = ForkServer([])
    text = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    ranks = [
        server.start([sys.executable, "-c", text, str(tmp_path / str(r))], os.environ)
        for r in range(2)
    ]
    while len(list(tmp_path.iterdir())) < 2:
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.01)
    ranks[0].send_signal(signal.SIGTERM)
    assert ranks[0].wait() == -signal.SIGTERM
    assert ranks[1].poll() is None
    pid = ranks[1].pid
    server.kill()
    assert ranks[1].wait() == -signal.SIGKILL
    while os.path.exists(f"/proc/{pid}"):  # the system's signal is on its way
        time.sleep(0.01)


def test_a_signal_before_the_fork_ends_the_rank() -> None:
    server = ForkServer([])
    rank = server.start([sys.executable, "-c", ""], os.environ)
    rank.send_signal(signal.SIGINT)
    assert rank.wait() == -signal.SIGINT


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "exit 0"],
        [sys.executable],
        [sys.executable, "-u", "x.py"],
        [sys.executable, "-"],
    ],
)
def test_other_commands_are_executed(command: list[str]) -> None:
    assert not can_fork(command)


def test_the_program_may_be_in_a_module_of_its_own(tmp_path: Path) -> None:
    """Classes of the program are pickled by the name __main__, also from its atexit handlers."""
    text = """
        import atexit, pickle
        class Own:
            pass
        copy = pickle.loads(pickle.dumps(Own()))
        assert type(copy) is Own
        atexit.register(lambda: pickle.loads(pickle.dumps(copy)))
        """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(text))
    assert start_ranks([sys.executable, str(file)], [1], preload=[]) == 0
