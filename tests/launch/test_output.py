"""Output of ranks that passes through the agent, and a rank that is debugged."""

import os
import sys

import pytest

from ddp_from_scratch import UsageError, start_ranks
from ddp_from_scratch.launch.output import Output
from tests.support.failing_run import RUN_PY, Run

pytestmark = pytest.mark.timeout(180)

RANK = """
import os, signal, sys
rank = os.environ["RANK"]
print(f"out {rank}")
print(f"[rank {rank}] ValueError")
print("half", end="")
sys.stderr.write(f"err {rank}\\n")
if rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED = "rank 1 was killed by SIGKILL; all other ranks were stopped\n"


@pytest.mark.program
@pytest.mark.parametrize("command", [["-c", RANK], ["-u", "-c", RANK]])  # forked, and executed
def test_a_prefix_and_a_file_for_each_rank(command, tmp_path, capfd):
    folder = tmp_path / "a" / "b"
    for times in (1, 2):
        code = start_ranks([sys.executable, *command], [2], output_prefix=True, output_dir=folder)
        assert code == 137
        out, err = capfd.readouterr()
        # Rank 0 may have been stopped before it wrote anything.
        mine = [line for line in out.splitlines() if line.startswith("[rank 1]")]
        assert mine == ["[rank 1] out 1", "[rank 1] ValueError", "[rank 1] half"]
        assert "[rank 1] err 1\n" in err
        assert err.endswith(KILLED) or KILLED in err
        lines = (folder / "rank-1.log").read_text().splitlines()
        expected = ["out 1", "[rank 1] ValueError", "half", "err 1"] * times
        assert sorted(lines) == sorted(expected)


@pytest.mark.program
@pytest.mark.slow
def test_only_some_ranks_are_shown(capfd):
    program = "import os; print('rank', os.environ['RANK'])"
    assert start_ranks([sys.executable, "-c", program], [3], output_ranks=[2]) == 0
    assert capfd.readouterr().out == "rank 2\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([b"a\nb", b"c\n"], b"> a\n> bc\n"),
        ([b"\r10 %", b"\r20 %", b"\n"], b"> \r> 10 %\r> 20 %\n"),
        ([b"a\r", b"\nb\r\n"], b"> a\r\n> b\r\n"),
        ([b"\0\xff\n", b"\x1b[31mred"], b"> \0\xff\n> \x1b[31mred\n"),
        ([b"> known\n", b"new\n"], b"> known\n> new\n"),
        ([b"x" * 70_000], b"> " + b"x" * 70_000 + b"\n"),
    ],
)
def test_lines_are_passed_on_whole(written, shown, tmp_path):
    from ddp_from_scratch.launch.output import Target, _Stream

    file = tmp_path / "shown"
    stream = _Stream(b"> ", Target(os.open(file, os.O_CREAT | os.O_WRONLY), "it"), None)
    for text in written:
        stream.take(text)
    stream.end()
    found = file.read_bytes()
    assert found in (shown, shown[:-1])  # a part of an endless line is passed on as it is


def test_a_full_disk_is_said_once(tmp_path, capfd):
    output = Output("rank {}", False, None, tmp_path)
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    path = output.open(0)
    for text in (b"a\n", b"b\n"):
        with open(f"{path}1", "wb", 0) as pipe:
            pipe.write(text)
    output.close()
    out, err = capfd.readouterr()
    file = tmp_path / "rank-0.log"
    told = f"warning: {file} cannot be written to (No space left on device): continuing without\n"
    assert (out, err) == ("a\nb\n", told)


@pytest.mark.program
def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"output directory .*file cannot be written to \("):
        start_ranks([sys.executable, "-c", ""], [2], output_dir=tmp_path / "file")
    with Run(sys.executable, RUN_PY, "--output-dir", str(tmp_path / "file")) as run:
        assert run.wait() == 2, run.text
        assert run.err.startswith("error: the output directory ")


@pytest.mark.parametrize("ranks", ["2", "0,x", "-1"])
def test_ranks_of_run_py_that_do_not_exist(ranks):
    with Run(sys.executable, RUN_PY, f"--output-ranks={ranks}") as run:
        assert run.wait() == 2, run.text
        assert run.err.startswith("error: --output-ranks must be ranks below 2 as in 0,2, got ")


DEBUGGED = """
import os, sys
number = 41 + int(os.environ["RANK"])
breakpoint()
print(f"rank {os.environ['RANK']} continues\\n", end="", flush=True)
"""


@pytest.mark.program
@pytest.mark.slow
def test_one_rank_has_the_debugger(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    read, write = os.pipe()
    os.write(write, b"p number\nc\n")
    os.close(write)
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        assert start_ranks([sys.executable, "-c", DEBUGGED], [2], stdin=1) == 0
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(read)
    out = capfd.readouterr().out
    assert "(Pdb) 42\n" in out
    assert out.count("continues") == 2


def test_a_rank_that_does_not_exist_is_not_debugged():
    for stdin, restarts in ((2, None), (0, 1)):
        with pytest.raises(UsageError, match="stdin must be a rank, 0 to 1, of a job without"):
            start_ranks([sys.executable, "-c", ""], [2], stdin=stdin, max_restarts=restarts)
