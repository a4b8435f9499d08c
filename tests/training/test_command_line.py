"""run.py as a user types it: under every launcher, and with every kind of mistake."""

import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.failing_run import LIMIT_S, MACHINE, ROOT, RUN_PY, Run
from tests.support.tiers import slow

ONE_EPOCH = ["--epochs", "1", "--check-sync"]
CHECKED = re.compile(r"parameters ([0-9a-f]{16}), bit-identical on (\d+) ranks\n")
ACCURACY = re.compile(r"digits test accuracy (0\.\d{4})\n")


def run_py(*arguments: object, **environ: str) -> Run:
    return Run(sys.executable, RUN_PY, *map(str, arguments), **environ)


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Result, Path]]:
    """`python run.py`, its result, and the folder with its checkpoint and metrics."""
    folder = tmp_path_factory.mktemp("trained")
    kept = ["--checkpoint-dir", folder / "checkpoints", "--log-dir", folder / "logs"]
    with run_py(*ONE_EPOCH, *kept) as run:
        yield run, result_of(run), folder


def test_without_a_launcher(trained: tuple[Run, Result, Path]) -> None:
    run, result, folder = trained
    assert result.world_size == 2
    assert float(result.accuracy) > 0.85
    lines = run.out.splitlines()
    assert re.fullmatch(
        r"epoch   1/1  loss \d\.\d{4}  train \d\d\.\d\d%  test \d\d\.\d\d%  [\d,]+ images/s",
        lines[0],
    )
    assert lines[1].startswith("parameters ")
    assert re.fullmatch(r"gloo, 2 ranks, global batch 64, cnn, \d+\.\d s", lines[2])
    assert lines[3] == f"checkpoint {folder}/checkpoints/checkpoint-000001.pt"
    assert lines[4] == f"metrics {folder}/logs"
    assert lines[5:] == [f"digits test accuracy {result.accuracy}"]
    assert (folder / "logs" / "metrics.jsonl").read_text().count("\n") == 1
    # Not on a terminal: neither a bar nor a colour.
    assert run.err == ""
    assert "\r" not in run.out
    assert "\033" not in run.out


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_timeline_is_printed_and_written(
    backend: str, trained: tuple[Run, Result, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "timeline"
    options = ["--backend", backend, "--timeline", folder, "--timeline-steps", "2"]
    with run_py(*ONE_EPOCH, *options) as run:
        assert result_of(run) == trained[1]  # the same bits
        assert "\033" not in run.out
        for rank in range(2):
            assert re.search(rf"^rank {rank} +\|.*F.*B.*O.*\|$", run.out, re.MULTILINE)
        assert "1 bucket of 0.147 MiB: it is full near the end of backward" in run.out
        assert f"timeline {folder}/timeline.html\n" in run.out
        assert (folder / "timeline.txt").read_text() in run.out
    files = {"timeline.html", "timeline.txt", "trace.json"}
    assert files <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_stragglers_are_printed_and_logged(
    backend: str, trained: tuple[Run, Result, Path], tmp_path: Path
) -> None:
    options = ["--backend", backend, "--stragglers", "10", "--log-dir", tmp_path]
    with run_py(*ONE_EPOCH, *options) as run:
        assert result_of(run) == trained[1]  # the same bits
        lines = re.findall(r"^steps \d+-(\d+): .*a step takes", run.out, re.MULTILINE)
    assert lines == ["10", "20"]
    logged = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [entry["step"] for entry in logged] == [10, 20, 22]
    for entry in logged[:2]:
        assert entry["averaged_bytes"] == 153_768  # four for each of the model's parameters
        parts = {"data", "forward", "backward", "optimizer", "waiting", "exposed", "step"}
        assert all(entry[f"{part}_ms"] >= 0 for part in parts)
        assert entry["images_per_second"] == pytest.approx(64e3 / entry["step_ms"])


def test_a_saved_model_has_the_accuracy_that_training_printed(
    trained: tuple[Run, Result, Path],
) -> None:
    _, result, folder = trained
    (saved,) = (folder / "checkpoints").glob("*.pt")
    with run_py("test", "--checkpoint", saved, "--quiet") as run:
        assert run.wait() == 0, run.text
        assert run.text == (f"digits test accuracy {result.accuracy}\n\n--- standard error:\n")


@pytest.mark.slow
def test_a_saved_model_is_for_its_data(trained: tuple[Run, Result, Path]) -> None:
    (saved,) = (trained[2] / "checkpoints").glob("*.pt")
    with run_py("test", "--checkpoint", saved, "--dataset", "fake", "--nproc", 1) as run:
        assert_one_line(run, "was trained on digits", "but fake has")


@pytest.mark.slow
def test_mpi_starts_itself_under_mpirun_and_says_so(trained: tuple[Run, Result, Path]) -> None:
    with run_py("--backend", "mpi", "--nproc", 2, "--quiet", *ONE_EPOCH) as run:
        assert result_of(run) == trained[1]
        assert re.fullmatch(r"starting: \S*mpirun -n 2 \S*python\S* \S*run\.py .*\n", run.err)
        assert len(run.out.splitlines()) == 2  # quiet: the checksum that was asked for, the result


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        slow("mpirun -n 4 python run.py --backend mpi", 4),
        slow("mpirun -n 2 python run.py --backend gloo", 2),
        slow("torchrun --nproc-per-node 2 run.py --backend gloo", 2),
        slow("python run.py --nproc 1", 1),
    ],
)
def test_launchers(command: str, ranks: int, trained: tuple[Run, Result, Path]) -> None:
    with Run(*command.split(), *ONE_EPOCH) as run:
        result = result_of(run)
        assert run.err == ""
        assert f", {ranks} ranks, " in run.out
    assert result.world_size == ranks
    if ranks == 2:
        assert result == trained[1]


SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def test_srun(trained: tuple[Run, Result, Path], tmp_path: Path) -> None:
    with ExitStack() as stack:
        tasks = [
            stack.enter_context(
                run_py(
                    *ONE_EPOCH,
                    **SRUN,
                    TMPDIR=str(tmp_path),
                    SLURM_PROCID=str(task),
                    SLURM_LOCALID=str(task),
                )
            )
            for task in range(2)
        ]
        assert result_of(tasks[0]) == trained[1]
        assert tasks[1].wait() == 0
        assert tasks[1].text == "\n--- standard error:\n"


# A rank that was asked for something else --------------------------------------------------------

OTHER_LR = "error: --lr is 0.05 on rank 0 and 0.1 on rank 1: it must be the same on all ranks"


def assert_told_once(told: str, *runs: Run) -> None:
    """All end with code 2 (torchrun has one of its own), and one says why."""
    for run in runs:
        assert run.wait() in (2, 1 if "torchrun" in str(run.process.args) else 2), run.text
        run.assert_nobody_left()
        assert run.out == "", run.text
    lines = [line for run in runs for line in run.err.splitlines()]
    assert [line for line in lines if line.startswith("error: ")] == [told], lines
    assert 'Traceback (most recent call last):\n  File "run.py' not in "\n".join(lines)


EACH = "-n 1 python run.py --backend"
OTHERS = {
    "mpirun": ("lr", f"mpirun {EACH} mpi : {EACH} mpi --lr 0.1"),
    "mpirun, another backend": ("backend", f"mpirun {EACH} gloo : {EACH} mpi"),
    "torchrun": ("lr", "torchrun --nproc-per-node 2 --no-python sh -c"),
}
OTHER_BACKEND = (
    "error: backend is gloo on rank 0 and mpi on rank 1: it must be the same on all ranks"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_of_one_rank(name: str, tmp_path: Path) -> None:
    what, command = OTHERS[name]
    lr = ["exec python run.py --lr $([ $RANK = 0 ] && echo 0.05 || echo 0.1)"]
    more = lr if name == "torchrun" else []
    with Run(*command.split(), *more, TMPDIR=str(tmp_path)) as run:
        assert_told_once(OTHER_LR if what == "lr" else OTHER_BACKEND, run)
    assert list(tmp_path.glob("ddp-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "start_ranks on two machines"])
def test_other_settings_of_one_command(launcher: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--nproc", "1,1", "--master-addr", "127.0.0.1", "--master-port", port]
    environ = {"DDP_SECRET": "known to both machines"}
    if launcher == "srun":
        options, environ = [], SRUN | {"TMPDIR": str(tmp_path)}
    with ExitStack() as stack:
        runs = []
        for number, lr in enumerate(("0.05", "0.1")):
            node = ["--node-rank", number] if options else []
            place = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            own = environ | ({} if options else place)
            runs.append(stack.enter_context(run_py(*options, *node, "--lr", lr, **own)))
        assert_told_once(OTHER_LR, *runs)


@pytest.mark.slow
def test_torchrun_starts_a_failed_run_again_and_it_resumes(tmp_path: Path) -> None:
    driver = str(ROOT / "tests" / "support" / "failing_run.py")
    start = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", driver, "kill_once"]
    with Run(
        *start,
        "--epochs",
        "3",
        "--check-sync",
        "--checkpoint-dir",
        str(tmp_path),
        "--resume",
        "auto",
    ) as run:
        assert run.wait() == 0, run.text
        run.assert_nobody_left()
        assert f"no checkpoint in {tmp_path} yet: starting anew" in run.out
        assert f"resuming from {tmp_path}/checkpoint-000001.pt" in run.out
        assert len(ACCURACY.findall(run.out)) == 1
        assert len(CHECKED.findall(run.out)) == 3


def on_a_terminal(*command: str) -> tuple[int, str]:
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


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_a_terminal_shows_a_bar(backend: str, trained: tuple[Run, Result, Path]) -> None:
    command = [sys.executable, RUN_PY, "--backend", backend, "--nproc", "2", *ONE_EPOCH]
    code, written = on_a_terminal(*command)
    assert code == 0, written
    assert result_in(written.replace("\r\n", "\n")) == trained[1]
    assert ("starting: " in written) == (backend == "mpi")
    first = written.partition("epoch   1/1  loss")[0]
    bars = [part for part in first.split("\r") if part.startswith("epoch 1/1: ")]
    assert bars, written
    assert all("/22 [" in bar and len(bar) == 79 for bar in bars), written


def test_a_terminal_shows_a_mistake_in_red() -> None:
    code, written = on_a_terminal(sys.executable, RUN_PY, "--lr", "-1")
    assert (code, written) == (
        2,
        "\033[31merror: --lr must be a positive number, at most 1e+30, got -1.0\033[0m\r\n",
    )


# Nobody reads what is printed ---------------------------------------------------------------------


def in_a_shell(command: str) -> Run:
    return Run("bash", "-c", f"set -o pipefail; {command}")


@pytest.mark.parametrize(
    ("where", "nproc"), [("| head -1", 2), slow(">/dev/full", 1), slow("<&- >&- 2>&-", 2)]
)
def test_a_run_goes_on_when_it_cannot_print(where: str, nproc: int, tmp_path: Path) -> None:
    run_py = f"{sys.executable} {RUN_PY} --nproc {nproc} --epochs 2 --checkpoint-dir {tmp_path}"
    with in_a_shell(f"{run_py} {where}") as run:
        assert run.wait() == 0, run.text
        run.assert_nobody_left()
        reason = {"| head -1": "Broken pipe", ">/dev/full": "No space left on device"}.get(where)
        told = f"warning: standard output cannot be written to ({reason}): going on without\n"
        assert run.err == (told if reason else ""), run.text
    assert (tmp_path / "checkpoint-000002.pt").exists()


def test_help_that_is_cut_off() -> None:
    with in_a_shell(f"{sys.executable} {RUN_PY} --help | head -1") as run:
        assert run.wait() == 0, run.text
        assert run.err == ""


# Mistakes -----------------------------------------------------------------------------------------


def assert_one_line(run: Run, *told: str, alone: bool = True) -> None:
    """Ends with code 2 and one line of ours; a launcher's own words may follow unless `alone`."""
    assert run.wait() == 2 or not alone, run.text
    assert run.wait() != 0
    run.assert_nobody_left()
    assert run.out == ""
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.text
    assert all(words in errors[0] for words in told), errors[0]
    if alone:
        assert run.err == f"{errors[0]}\n"
    assert f'File "{RUN_PY}"' not in run.err  # a traceback of ours


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu() -> None:
    with run_py("--backend", "nccl") as run:
        assert_one_line(run, "--backend nccl needs a GPU", "use --backend gloo or mpi")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        slow("--dataset mnist --data-dir /nowhere", ["/nowhere", "--download"]),
        slow("--checkpoint-dir /etc/hostname/c", ["--checkpoint-dir /etc/hostname/c"]),
        slow("--log-dir /etc/hostname/l", ["/etc/hostname/l", "--log-dir"]),
        slow("--resume /nowhere.pt", ["/nowhere.pt"]),
        slow("--global-batch-size 7 --accumulate 2", ["1 ranks x --accumulate 2 = 2, got 7"]),
        ("test --checkpoint /etc/hostname", ["/etc/hostname", "not", "checkpoint"]),
    ],
)
def test_what_cannot_be_had(arguments: str, told: list[str]) -> None:
    with run_py(*arguments.split(), "--nproc", 1) as run:
        assert_one_line(run, *told)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_timeline_that_cannot_be_written(backend: str) -> None:
    with run_py("--timeline", "/etc/hostname/t", "--backend", backend) as run:
        assert_one_line(
            run, "cannot write the timeline to /etc/hostname/t", alone=backend == "gloo"
        )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("python run.py", 2),
        slow("mpirun -n 2 python run.py --backend mpi", 2),
        slow("torchrun --nproc-per-node 2 run.py", 1),
    ],
)
def test_all_ranks_agree_on_a_mistake(command: str, code: int) -> None:
    with Run(*command.split(), "--model", "resnet19") as run:
        assert_one_line(run, "unknown model 'resnet19'", alone=command == "python run.py")
        assert run.wait() == code


def test_control_characters_of_the_users_are_printed_as_such() -> None:
    with run_py("--foo\nbar\033[31m") as run:
        assert_one_line(run, r"unrecognized arguments: --foo\nbar\x1b[31m; see --help")


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a network namespace")
@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_without_a_network(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a group opened here leaves it behind
    with Run("unshare", "-n", sys.executable, RUN_PY, "--backend", backend) as run:
        assert_one_line(run, "the loopback interface lo is down", "ip link set lo up")


@pytest.mark.slow
def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "TMPDIR": str(tmp_path)}
    with run_py("--timeout", 2, **SRUN, **task) as run:
        assert_one_line(run, "rank 0 waited 2 s for all 2 ranks: not all have started")
