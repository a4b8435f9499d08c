"""A run that ends early ends completely: soon, with one message, and with no process left."""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_from_scratch.common.errors import PeerError, UsageError
from ddp_from_scratch.launch import rank_process
from tests.support.failing_run import LAUNCHERS, RUN_PY, Run
from tests.support.tiers import slow

LONG = [RUN_PY, "--epochs", "100000"]
END_S = 10.0  # issue 2: from the failure to the end of everything, on every launcher

pytestmark = pytest.mark.timeout(180)

# As run.py, but the last rank fails in the third step, with the first buckets in flight.
FAILS = """
import os, signal, sys
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.main import main

def fail(gradient):
    print("fails now", flush=True)
    {how}

def fails(trainer, batches):
    if trainer.step == 2 and trainer.world.rank == trainer.world.world_size - 1:
        next(trainer.model.parameters()).register_hook(fail)  # whose gradient is the last one
    step(trainer, batches)

step, Trainer._step = Trainer._step, fails
if __name__ == "__main__":  # workers of data loaders import the file, too
    run_to_exit(lambda: main([sys.argv[0]], sys.argv[1:]))
"""
KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", 'raise ValueError("on purpose")'


def assert_ends(run):
    code = run.wait(END_S)
    run.assert_nobody_left(END_S)
    assert code != 0, run.text
    return code


@pytest.mark.program
@pytest.mark.parametrize(
    ("launcher", "failure"), [("start_ranks", KILL), slow("mpirun", RAISE), slow("torchrun", KILL)]
)
def test_a_rank_that_fails_ends_the_run(launcher, failure, tmp_path):
    (tmp_path / "program.py").write_text(FAILS.format(how=failure))
    # Workers have to notice the end of their rank; of a killed one Python's own tracker complains.
    workers = "0" if launcher == "start_ranks" else "1"
    with Run(*LAUNCHERS[launcher], str(tmp_path / "program.py"), "--workers", workers) as run:
        run.wait_for("fails now")
        code = assert_ends(run)
        lines = run.text.splitlines()
        assert not [line for line in lines if line.startswith(("error:", "[rank 0]"))], run.text
        said = [line for line in lines if line.startswith("[rank 1]")]
        if failure == KILL:
            assert not said, run.text
        else:
            assert code == 1
            assert said.count("[rank 1] ValueError: on purpose") == 1, run.text
            assert run.text.count("ValueError: on purpose") == 1, run.text
        if launcher == "start_ranks":
            assert code == 128 + signal.SIGKILL
            assert run.err == "rank 1 was killed by SIGKILL; all other ranks were stopped\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "backend", "numbers"),
    [
        ("none", "gloo", (signal.SIGINT,)),
        ("none", "mpi", (signal.SIGTERM, signal.SIGUSR1)),
        ("torchrun", "gloo", (signal.SIGTERM,)),
    ],
)
def test_a_signal_leaves_a_checkpoint_that_can_be_resumed(launcher, backend, numbers, tmp_path):
    command = [*LAUNCHERS[launcher], *LONG, "--backend", backend, "--workers", "1"]
    step = 0
    for number in numbers:
        arguments = ["--checkpoint-dir", str(tmp_path), "--resume", "auto"]
        with Run(*command, *arguments, TMPDIR=str(tmp_path)) as run:
            run.wait_for("  loss ")
            if step:
                assert f"resuming from {tmp_path}/checkpoint-{step:06d}.pt" in run.out
            run.signal(number)
            code = assert_ends(run)
            assert "[rank" not in run.text
            if launcher == "none":
                assert code == 128 + number
                assert "Traceback" not in run.text
                assert run.err.count("stopping all ranks; once more ends them at once") == 1
                assert "Exit code" not in run.err  # of mpirun's report
            saved = re.search(r"stopped in epoch .*; saved (\S+): --resume auto continues", run.out)
            assert saved, run.text
            now = int(Path(saved[1]).stem.removeprefix("checkpoint-"))
            assert now > step
            assert Path(saved[1]).exists()
            step = now
        assert list(tmp_path.glob("ddp-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "backend"), [("none", "mpi"), ("torchrun", "gloo")])
def test_ranks_die_with_their_launcher(launcher, backend, tmp_path):
    workers = 1 if launcher == "torchrun" else 0
    arguments = ["--backend", backend, "--workers", str(workers), "--checkpoint-dir", str(tmp_path)]
    # Quiet: a rank that prints to a launcher that is gone would end by itself.
    with Run(*LAUNCHERS[launcher], *LONG, "--quiet", *arguments) as run:
        while not list(tmp_path.glob("checkpoint-*.pt")):
            assert run.process.poll() is None, run.text
            time.sleep(0.05)
        assert len(run.processes()) >= 3 + 2 * workers  # the launcher, two ranks, their workers
        run.signal(signal.SIGKILL)
        assert_ends(run)


def imports_torch(run):
    for pid in run.processes():
        with suppress(OSError):
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


# While the only rank imports, and while the fork server does.
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_before_training_has_begun(ranks):
    with Run(sys.executable, RUN_PY, "--nproc", str(ranks)) as run:
        while not imports_torch(run):
            assert run.process.poll() is None, run.text
        assert "epoch" not in run.text
        run.signal(signal.SIGINT)
        assert assert_ends(run) == 128 + signal.SIGINT
        told = "stopping all ranks; once more ends them at once\n" if ranks > 1 else ""
        assert run.text == f"\n--- standard error:\n{told}"


class Ended(BaseException):
    pass


CLOSED = "[/src/gloo/tcp/pair.cc:547] Connection closed by peer"
TIMEOUT = "Application timeout caused pair closure"
WATCHDOG = "NCCL watchdog: remote error"
ABORTED = "NCCL communicator was aborted on rank 1"
FULL_SHM = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error \
(run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error: failed to extend /dev/shm/nccl-7aXkQe, error: No space left on device (28)
"""
PEER_GONE = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or \
there was a network error, NCCL version 2.30.7
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
socketProgress: Connection closed by remote peer 10.0.0.2<47311>
"""
LOST = "error: rank 0 lost the other ranks: {}\n".format


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("--lr must be positive"), 2, "error: --lr must be positive\n"),
        (PeerError("rank 1: no such file"), 2, ""),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
        (ValueError("a bug\nof ours"), 1, "[rank 0] ValueError: a bug\n[rank 0] of ours\n"),
        (RuntimeError(f"{CLOSED}\nstack"), 1, LOST(CLOSED)),
        (RuntimeError(TIMEOUT), 1, LOST(TIMEOUT)),
        (dist.DistBackendError(ABORTED), 1, LOST(ABORTED)),
        (dist.DistBackendError(PEER_GONE), 1, LOST(PEER_GONE.partition("\n")[0])),
        (dist.DistBackendError(WATCHDOG), 1, LOST(WATCHDOG)),
        # A failure of NCCL that is the rank's own, with NCCL's reason.
        (
            dist.DistBackendError(FULL_SHM),
            1,
            "error: rank 0: NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.30.7. Last error: failed to extend /dev/shm/nccl-7aXkQe, error: No "
            "space left on device (28)\n",
        ),
    ],
)
def test_how_a_rank_ends(error, code, told, monkeypatch, capsys):
    def end(code):
        raise Ended(code)

    def main():
        raise error

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(Ended) as ended:
        rank_process.run_to_exit(main)
    assert ended.value.args == (code,)
    err = capsys.readouterr().err
    if told.startswith("[rank 0]"):
        assert err.startswith("[rank 0] Traceback (most recent call last):\n")
        assert err.endswith(told)
        assert all(line.startswith("[rank 0] ") for line in err.splitlines())
    else:
        assert err == told
