"""run.py as a user types it: under every launcher, and with every kind of mistake."""

import json
import os
import pty
import re
import shlex
import sys

import pytest

from ddp_from_scratch.training.main import main
from tests.support.failing_run import RUN_PY, Run
from tests.support.tiers import slow

pytestmark = pytest.mark.program

ONE_EPOCH = ["--epochs", "1", "--check-sync"]


def result_of(run):
    assert run.wait() == 0, run.text
    run.assert_nobody_left()
    checked = re.findall(r"parameters ([0-9a-f]{16}), bit-identical on (\d+) ranks\n", run.out)
    accuracies = re.findall(r"digits test accuracy (0\.\d{4})\n", run.out)
    assert len(checked) == len(accuracies) == 1, run.out  # one rank speaks
    return *checked[0], accuracies[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two ranks, with all that it can leave, its result, and the folder."""
    folder = tmp_path_factory.mktemp("trained")
    kept = ["--checkpoint-dir", f"{folder}/checkpoints", "--log-dir", f"{folder}/logs"]
    kept += ["--timeline", f"{folder}/timeline", "--stragglers", "10"]
    with Run(sys.executable, RUN_PY, *ONE_EPOCH, *kept) as run:
        yield run, result_of(run), folder


def test_what_is_printed_and_written(trained):
    run, (_, world_size, accuracy), folder = trained
    assert world_size == "2"
    assert float(accuracy) > 0.85
    for line in (
        r"epoch   1/1  loss \d\.\d{4}  train \d\d\.\d\d%  test \d\d\.\d\d%  [\d,]+ images/s",
        r"gloo, 2 ranks, global batch 64, cnn, \d+\.\d s",
    ):
        assert re.search(f"^{line}$", run.out, re.MULTILINE), f"{line}\n{run.out}"
    assert (folder / "timeline" / "timeline.txt").read_text() in run.out
    assert re.findall(r"^steps \d+-(\d+): .*a step takes", run.out, re.MULTILINE) == ["10", "20"]
    # Not on a terminal: neither a bar nor a colour.
    assert run.err == ""
    assert "\r" not in run.out
    assert "\033" not in run.out
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    logged = list(map(json.loads, lines))
    assert [entry["step"] for entry in logged] == [10, 20, 22]
    for entry in logged[:2]:
        assert entry["averaged_bytes"] == 153_768  # four for each of the model's parameters
        assert entry["images_per_second"] == pytest.approx(64e3 / entry["step_ms"])


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        (["--lr", "-1"], 2, "^\033\\[31merror: --lr must be .*, got -1.0\033\\[0m\r\n$"),
        slow(["--epochs", "1", "--nproc", "2"], 0, "\repoch 1/1: .*/22 "),
    ],
    ids=["red", "bar"],
)
def test_a_terminal_shows_colours_and_a_bar(options, code, shown):
    written = []

    def read(terminal):
        written.append(os.read(terminal, 65536))
        return written[-1]

    command = f"stty cols 80 rows 24; exec {shlex.join([sys.executable, RUN_PY, *options])}"
    assert os.waitstatus_to_exitcode(pty.spawn(["sh", "-c", command], read)) == code
    assert re.search(shown, b"".join(written).decode())


def test_a_saved_model_has_the_accuracy_that_training_printed(trained, capsys):
    _, (*_, accuracy), folder = trained
    saved = str(folder / "checkpoints" / "checkpoint-000001.pt")
    assert main([RUN_PY], ["test", "--checkpoint", saved, "--nproc", "1", "--quiet"]) == 0
    assert capsys.readouterr() == (f"digits test accuracy {accuracy}\n", "")


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
    assert result[1] == str(ranks)
    assert ranks != 2 or result == trained[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "reason"), [("| head -1", "Broken pipe"), ("<&- >&- 2>&-", None)], ids=str
)
def test_a_run_continues_when_it_cannot_print(end, reason, tmp_path):
    command = f"{sys.executable} {RUN_PY} --epochs 2 --checkpoint-dir {tmp_path} --nproc 2 {end}"
    with Run("bash", "-c", f"set -o pipefail; {command}") as run:
        assert run.wait() == 0, run.text
        run.assert_nobody_left()
        told = f"warning: standard output cannot be written to ({reason}): continuing without\n"
        assert run.err == (told if reason else ""), run.text
    assert (tmp_path / "checkpoint-000002.pt").exists()


OTHER_BACKEND = "backend is gloo on rank 0 and mpi on rank 1: it must be the same on all ranks"


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("python run.py --foo\nbar\033[31m", 2, r"arguments: --foo\nbar\x1b[31m; see --help"),
        slow("python run.py --resume /nowhere.pt", 2, "/nowhere.pt"),
        slow("torchrun --nproc-per-node 2 run.py --model resnet19", 1, "unknown model 'resnet19'"),
        slow("python run.py test --dataset fake --checkpoint SAVED", 2, "trained on digits"),
        slow("mpirun -n 1 python run.py : -n 1 python run.py --backend mpi", 2, OTHER_BACKEND),
    ],
)
def test_a_mistake_is_one_line_of_all_ranks(command, code, told, trained, tmp_path):
    saved = str(trained[-1] / "checkpoints" / "checkpoint-000001.pt")
    words = [saved if word == "SAVED" else word for word in command.split(" ")]
    with Run(*words, TMPDIR=str(tmp_path)) as run:
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        assert run.out == ""
        (error,) = (line for line in run.err.splitlines() if line.startswith("error: "))
        assert told in error
        if words[0] == "torchrun":  # its report, the end of what it prints, has the cause, too
            assert f"traceback : {error}" in "".join(run.err.splitlines(keepends=True)[-5:])
        if words[0] == "python":
            assert run.err == f"{error}\n"
        assert f'File "{RUN_PY}"' not in run.err  # a traceback of ours
    assert list(tmp_path.glob("ddp-*")) == []
