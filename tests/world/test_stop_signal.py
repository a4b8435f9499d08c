"""Ranks that stop together: a signal that one of them has received is known to all of them."""

import multiprocessing
import os
import signal
import threading
from unittest.mock import patch

import pytest
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch.common import group as common_group
from tests.support.failing_run import LAUNCHERS, Run
from tests.support.on_ranks import on
from tests.support.refusal import refusal
from tests.support.tiers import slow


@on("pair")
def test_all_ranks_stop_after_the_step_that_follows_the_signal(world):
    found = []
    with ddp.StopSignal() as stop, patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        for step in range(5):
            if step == 1 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            found.append(stop.requested())
    assert found == [0, 0, *[signal.SIGUSR1] * 3]
    assert stop.received == (signal.SIGUSR1 if world.rank == 1 else 0)
    assert sent.call_count == 2, "one in each step, until the ranks agree"


@on("pair")
def test_ranks_with_different_signals_agree_on_one(world):
    with ddp.StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM if world.rank else signal.SIGINT)
        assert [stop.requested() for _ in range(3)] == [0, signal.SIGTERM, signal.SIGTERM]


@on("gloo-2")
def test_a_loop_that_ends_by_itself_leaves_nothing_in_flight(world):
    with ddp.StopSignal() as stop:
        assert stop.requested() == 0
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # too late for this loop
        assert stop.requested() == 0
        last = stop._work
    assert last.is_completed()
    with ddp.StopSignal(dist.new_group([world.rank])) as alone:  # each rank by itself
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert [alone.requested(), alone.requested()] == [0, signal.SIGTERM * world.rank]


@pytest.mark.program
def test_a_process_that_is_forked_in_the_block_ends_at_the_first_signal():
    context = multiprocessing.get_context("fork")
    runs = context.Event()

    def work():
        runs.set()
        signal.pause()

    with ddp.StopSignal() as stop:
        child = context.Process(target=work)
        child.start()
        assert runs.wait(20)  # before that Python drops signals
        child.terminate()  # as a pool does, which then waits without a limit
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
    assert stop.received == 0


def test_handlers_are_those_of_the_block_alone():
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    before = [signal.getsignal(number) for number in numbers]
    stop = ddp.StopSignal()
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        # The same signal again ends the process.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == signal.SIGUSR1
    assert [signal.getsignal(number) for number in numbers] == before
    with stop:
        assert stop.received == 0  # entering resets it
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignored)


def test_where_it_cannot_be_used():
    stop = ddp.StopSignal()
    with pytest.raises(RuntimeError, match=r"write `with ddp.StopSignal\(\) as stop:`"):
        stop.requested()
    with (
        stop,
        patch.object(common_group, "_is_broken", lambda: False),  # lost ranks are replaced
        pytest.raises(RuntimeError, match=r"answer = run.exchange\(stop.received\)"),
    ):
        stop.requested()
    told = []
    thread = threading.Thread(target=lambda: told.append(refusal(stop.__enter__)), name="mine")
    thread.start()
    thread.join()
    assert "in the main thread, the only one that may handle signals, got mine" in told[0]


PROGRAM = """
import sys
import ddp_from_scratch as ddp

def main():
    with ddp.process_group(sys.argv[1]) as world, ddp.StopSignal() as stop:
        step = 0
        while not (number := stop.requested()):
            step += 1
            if step == 3 and world.rank == 0:
                print("trains", flush=True)
        told = f"rank {world.rank} of {world.world_size} stops after step {step}"
        print(told + "\\n", end="", flush=True)  # in one piece, beside the other rank's
    return 128 + number

sys.exit(main())
"""


@pytest.mark.program
@pytest.mark.parametrize(
    ("launcher", "backend", "number", "code"),
    [
        ("start_ranks", "gloo", signal.SIGINT, 128 + signal.SIGINT),
        slow("torchrun", "gloo", signal.SIGINT, 1),
        slow("mpirun", "mpi", signal.SIGUSR1, 128 + signal.SIGUSR1),
    ],
)
def test_a_launchers_signal_stops_all_ranks_after_one_step(
    launcher, backend, number, code, tmp_path
):
    (tmp_path / "program.py").write_text(PROGRAM)
    with Run(*LAUNCHERS[launcher], str(tmp_path / "program.py"), backend) as run:
        run.wait_for("trains")
        run.signal(number)
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        lines = sorted(line for line in run.out.splitlines() if line.startswith("rank "))
        assert len(lines) == 2, run.text
        begins = [f"rank {rank} of 2 stops after step " for rank in range(2)]
        assert [line.startswith(b) for line, b in zip(lines, begins, strict=True)] == [True] * 2
        assert len({line.split()[-1] for line in lines}) == 1, run.text
        # Of torchrun's own report no line is a rank's.
        assert "KeyboardInterrupt" not in run.text
        if launcher == "start_ranks":
            assert run.err == "stopping all ranks; once more ends them at once\n"
