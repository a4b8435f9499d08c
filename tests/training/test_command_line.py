"""run.py as a user types it: under every launcher, and with every kind of mistake."""

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_from_scratch.training.main import main
from tests.support.failing_run import LIMIT_S, MACHINE, ROOT, RUN_PY, Run
from tests.support.tiers import slow

PYTHON = sys.executable
ONE_EPOCH = ["--epochs", "1", "--check-sync"]
CHECKED = re.compile(r"parameters ([0-9a-f]{16}), bit-identical on (\d+) ranks\n")
ACCURACY = re.compile(r"digits test accuracy (0\.\d{4})\n")


@dataclass(frozen=True)
class Result:
    """What a run of one epoch came to."""

    checksum: str
    world_size: int
    accuracy: str


def result_of(run: Run) -> Result:
    assert run.wait() == 0, run.text
    run.assert_nobody_left()
    return result_in(run.out)


def result_in(printed: str) -> Result:
    checked, accuracies = CHECKED.findall(printed), ACCURACY.findall(printed)
    assert len(checked) == len(accuracies) == 1, printed  # one rank speaks
    return Result(checked[0][0], int(checked[0][1]), accuracies[0])


# Runs the package, and at the end prints what it has imported.
HEAVY = ["torch", "torch._dynamo", "torchvision", "tensorboard"]
TELL = f"""
import os, sys
from ddp_from_scratch.training.main import main
try:
    code = main([__file__], sys.argv[1:])
except (SystemExit, ValueError) as error:
    code = error
found = [name for name in {HEAVY} if name in sys.modules]
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "none"))
# In one write, whatever the buffering: other ranks print, too.
print(" ".join(["rank", rank, "ends with", str(code), "and", *found]) + "\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the program `TELL`, and later what `trained` leaves."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tell.py").write_text(TELL)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """A run of two ranks, with all that it can leave, and its result."""
    kept = ["--checkpoint-dir", f"{folder}/checkpoints", "--log-dir", f"{folder}/logs"]
    kept += ["--timeline", f"{folder}/timeline", "--timeline-steps", "2", "--stragglers", "10"]
    with Run(PYTHON, f"{folder}/tell.py", *ONE_EPOCH, *kept) as run:
        yield run, result_of(run)


def test_what_is_printed(trained, folder):
    run, result = trained
    assert result.world_size == 2
    assert float(result.accuracy) > 0.85
    for line in (
        r"epoch   1/1  loss \d\.\d{4}  train \d\d\.\d\d%  test \d\d\.\d\d%  [\d,]+ images/s",
        r"gloo, 2 ranks, global batch 64, cnn, \d+\.\d s",
        f"checkpoint {folder}/checkpoints/checkpoint-000001.pt",
        f"metrics {folder}/logs",
        f"timeline {folder}/timeline/timeline.html",
        *(rf"rank {rank} +\|.*F.*B.*O.*\|" for rank in range(2)),
        "1 bucket of 0.147 MiB: it is full near the end of backward.*",
        f"digits test accuracy {result.accuracy}",
    ):
        assert re.search(f"^{line}$", run.out, re.MULTILINE), f"{line}\n{run.out}"
    assert (folder / "timeline" / "timeline.txt").read_text() in run.out
    assert re.findall(r"^steps \d+-(\d+): .*a step takes", run.out, re.MULTILINE) == ["10", "20"]
    # Not on a terminal: neither a bar nor a colour.
    assert run.err == ""
    assert "\r" not in run.out
    assert "\033" not in run.out


def test_what_is_written(trained, folder):
    files = {"timeline.html", "timeline.txt", "trace.json"}
    assert files <= {path.name for path in (folder / "timeline").iterdir()}
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    logged = list(map(json.loads, lines))
    assert [entry["step"] for entry in logged] == [10, 20, 22]
    for entry in logged[:2]:
        assert entry["averaged_bytes"] == 153_768  # four for each of the model's parameters
        parts = {"data", "forward", "backward", "optimizer", "waiting", "exposed", "step"}
        assert all(entry[f"{part}_ms"] >= 0 for part in parts)
        assert entry["images_per_second"] == pytest.approx(64e3 / entry["step_ms"])


def test_what_is_not_needed_is_not_imported(trained, folder):
    """The program starts quickly: without torch, but in a rank, which needs only that."""
    assert sorted(re.findall(r"^rank \w+ ends .*$", trained[0].out, re.MULTILINE)) == [
        "rank 0 ends with 0 and torch tensorboard",  # it writes metrics
        "rank 1 ends with 0 and torch",
        "rank none ends with 0 and",
    ]
    for option, ends in (("--help", "with 0 and"), ("--lr=-1", "at most 1e+30, got -1.0 and")):
        with Run(PYTHON, f"{folder}/tell.py", option) as run:
            assert run.wait() == 0, run.text
            assert run.out.splitlines()[-1].endswith(ends)


def test_a_saved_model_has_the_accuracy_that_training_printed(trained, folder, capsys):
    saved = str(folder / "checkpoints" / "checkpoint-000001.pt")
    assert main([RUN_PY], ["test", "--checkpoint", saved, "--nproc", "1", "--quiet"]) == 0
    assert capsys.readouterr() == (f"digits test accuracy {trained[1].accuracy}\n", "")


# As srun starts two tasks.
SRUN = """env SLURM_JOB_ID=12 SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2
SLURM_STEP_TASKS_PER_NODE=2 bash -c '
SLURM_PROCID=1 SLURM_LOCALID=1 python run.py "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 python run.py "$@"; wait' srun"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("python -m ddp_from_scratch --backend mpi --nproc 2 --quiet", 2),
        ("mpirun -n 4 python run.py --backend mpi", 4),
        ("torchrun --nproc-per-node 2 run.py --backend gloo", 2),
        (SRUN, 2),
    ],
)
def test_launchers(command, ranks, trained, tmp_path):
    with Run(*shlex.split(command), *ONE_EPOCH, TMPDIR=str(tmp_path)) as run:
        result = result_of(run)
        if "quiet" in command:  # mpi starts itself under mpirun, and says so
            assert re.fullmatch(r"starting: \S*mpirun -n 2 \S*python\S* -m ddp_fro.*\n", run.err)
            assert len(run.out.splitlines()) == 2  # the checksum that was asked for, the result
        else:
            assert run.err == ""
            assert f", {ranks} ranks, " in run.out
    assert result.world_size == ranks
    assert ranks != 2 or result == trained[1]


@pytest.mark.slow
def test_torchrun_starts_a_failed_run_again_and_it_resumes(tmp_path):
    start = "torchrun --nproc-per-node 2 --max-restarts 1 tests/support/failing_run.py kill_once"
    options = f"--epochs 3 --check-sync --checkpoint-dir {tmp_path} --resume auto"
    with Run(*start.split(), *options.split()) as run:
        assert run.wait() == 0, run.text
        run.assert_nobody_left()
        assert f"no checkpoint in {tmp_path} yet: starting anew" in run.out
        assert f"resuming from {tmp_path}/checkpoint-000001.pt" in run.out
        assert len(ACCURACY.findall(run.out)) == 1
        assert len(CHECKED.findall(run.out)) == 3


# What is printed, and where nobody reads it -------------------------------------------------------


def on_a_terminal(*command):
    """The exit code, and all that is written to an 80 columns wide terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | MACHINE,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as process:
        os.close(slave)
        written = b""
        while True:
            try:
                written += os.read(master, 65536)
            except OSError:  # every end is closed
                break
        os.close(master)
        return process.wait(LIMIT_S), written.decode()


@pytest.mark.slow
def test_a_terminal_shows_a_bar(trained):
    """Also from a rank that mpirun has started."""
    code, written = on_a_terminal(PYTHON, RUN_PY, "--backend", "mpi", "--nproc", "2", *ONE_EPOCH)
    assert code == 0, written
    assert result_in(written.replace("\r\n", "\n")) == trained[1]
    first = written.partition("epoch   1/1  loss")[0]
    bars = [part for part in first.split("\r") if part.startswith("epoch 1/1: ")]
    assert bars, written
    assert all("/22 [" in bar and len(bar) == 79 for bar in bars), written


def test_a_terminal_shows_a_mistake_in_red():
    code, written = on_a_terminal(PYTHON, RUN_PY, "--lr", "-1")
    told = "error: --lr must be a positive number, at most 1e+30, got -1.0"
    assert (code, written) == (2, f"\033[31m{told}\033[0m\r\n")


RUN = f"{PYTHON} {RUN_PY} --epochs 2 --checkpoint-dir"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (f"{RUN} FOLDER --nproc 2 | head -1", "Broken pipe"),
        slow(f"{RUN} FOLDER --nproc 1 >/dev/full", "No space left on device"),
        slow(f"{RUN} FOLDER --nproc 2 <&- >&- 2>&-", None),
        (f"{PYTHON} {RUN_PY} --help | head -1", None),
    ],
    ids=["cut off", "full", "closed", "help cut off"],
)
def test_a_run_goes_on_when_it_cannot_print(command, reason, tmp_path):
    shell = f"set -o pipefail; {command.replace('FOLDER', str(tmp_path))}"
    with Run("bash", "-c", shell) as run:
        assert run.wait() == 0, run.text
        run.assert_nobody_left()
        told = f"warning: standard output cannot be written to ({reason}): going on without\n"
        assert run.err == (told if reason else ""), run.text
    assert "FOLDER" not in command or (tmp_path / "checkpoint-000002.pt").exists()


# Mistakes -----------------------------------------------------------------------------------------


def assert_one_line(run, told, code=2, alone=True):
    """Ends with this code and one line of ours; unless `alone` a launcher adds its own."""
    assert run.wait() == code, run.text
    run.assert_nobody_left()
    assert run.out == ""
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.text
    assert told in errors[0]
    if alone:
        assert run.err == f"{errors[0]}\n"
    assert f'File "{RUN_PY}"' not in run.err  # a traceback of ours


OTHER_BACKEND = "backend is gloo on rank 0 and mpi on rank 1: it must be the same on all ranks"


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("python run.py --resume /nowhere.pt", 2, "/nowhere.pt"),
        ("python run.py --foo\nbar\033[31m", 2, r"arguments: --foo\nbar\x1b[31m; see --help"),
        slow("python run.py --epochs 1 --timeline /proc/x", 2, "write the timeline to /proc"),
        slow("torchrun --nproc-per-node 2 run.py --model resnet19", 1, "unknown model 'resnet19'"),
        slow("python run.py test --dataset fake --checkpoint SAVED", 2, "trained on digits"),
        slow("mpirun -n 1 python run.py : -n 1 python run.py --backend mpi", 2, OTHER_BACKEND),
    ],
)
def test_a_mistake_is_one_line_of_all_ranks(command, code, told, trained, folder, tmp_path):
    saved = str(folder / "checkpoints" / "checkpoint-000001.pt")
    words = [saved if word == "SAVED" else word for word in command.split(" ")]
    with Run(*words, TMPDIR=str(tmp_path)) as run:
        assert_one_line(run, told, code, alone="mpi" not in command and "torchrun" not in command)
    assert list(tmp_path.glob("ddp-*")) == []


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a network namespace")
def test_without_a_network(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a group opened here leaves it behind
    with Run("unshare", "-n", PYTHON, RUN_PY) as run:
        assert_one_line(run, "the loopback interface lo is down, and ranks of one machine need it")
