"""`run.py --go-on`: ranks and machines are lost, and the checkpoint stays the same."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import torch

from benchmarks.harness.network import missing, two_hosts
from tests.support.failing_run import MACHINE
from tests.support.tiers import slow

# As run.py, but for a part of the trainer that is replaced first, on each rank.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.main import main

me = os.environ.get("DDP_MEMBER")
if me is not None:
    from ddp_from_scratch.training import loop
    from ddp_from_scratch.training.loop import Trainer, torch

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(name, fault, owner=Trainer):
        method = getattr(owner, name)
        def replacement(*args, **options):
            fault(args[0])
            return method(*args, **options)
        setattr(owner, name, replacement)

    FAULT
run_to_exit(lambda: main([sys.argv[0]], sys.argv[1:]))
"""


class Job:
    """A run of 256 digits a step, 5 steps an epoch; what it prints is in files."""

    def __init__(self, folder, fault="", *options, nproc=3, on=()):
        program = folder / "program.py"
        program.write_text(PROGRAM.replace("FAULT", fault.strip().replace("\n", "\n    ")))
        command = [*on, sys.executable, str(program), "--nproc", str(nproc), "--shards", "8"]
        command += ["--checkpoint-dir", str(folder / "checkpoints"), *options]
        self.place = folder / f"output-{len(list(folder.glob('output-*')))}"
        with self.place.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=os.environ | MACHINE
            )

    @property
    def text(self):
        return self.place.read_text()

    def wait_for(self, text):
        end = time.monotonic() + 40
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} is not in {self.text}"
            assert self.process.poll() is None, f"{text!r} is not in {self.text}"
            time.sleep(0.02)

    def end(self, code=0):
        """What it has printed."""
        try:
            assert self.process.wait(60) == code, self.text
        finally:
            self.process.kill()
        return self.text


def last(folder):
    """The tensors of the last checkpoint."""

    def tensors(state, name=""):
        if isinstance(state, torch.Tensor):
            yield name, state.contiguous().view(-1).view(torch.uint8).tolist()
        elif isinstance(state, dict | list | tuple):
            items = state.items() if isinstance(state, dict) else enumerate(state)
            for key, value in items:
                yield from tensors(value, f"{name}/{key}")

    newest = max((folder / "checkpoints").glob("checkpoint-*.pt"))
    return dict(tensors(torch.load(newest, weights_only=True)))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The checkpoint of a run of so many epochs on 2 ranks without --go-on."""
    found = {}

    def of(epochs):
        if epochs not in found:
            folder = tmp_path_factory.mktemp("quiet")
            Job(folder, "", "--epochs", str(epochs), nproc=2).end()
            found[epochs] = last(folder)
        return found[epochs]

    return of


FAULTS = {
    "a step": "before('_backward', lambda t: me == '1' and t.global_step == 4 and die())",
    "an evaluation": "before('_evaluate', lambda t: me == '0' and t.epoch == 1 and die())",
    "before a checkpoint": "before('_save', lambda t: me == '1' and t.epoch == 2 and die())",
    "in the last checkpoint": """
save = torch.save
def half(state, file):
    save(state, file)
    if me == "0" and state["epoch"] == 3:
        file.flush()
        die()
torch.save = half
""",
    "the start": "before('_begin', lambda t: me == '1' and die())",
    "the first meeting": """
broadcast = loop.broadcast_parameters
loop.broadcast_parameters = lambda model: die() if me == "1" else broadcast(model)
""",
    "the joining of another": """
before("_backward", lambda t: me == "1" and t.global_step == 4 and die())
if me == "3":
    before("_restore", lambda t: die())
""",
}


@pytest.mark.parametrize("name", ["a step", *(slow(name) for name in list(FAULTS)[1:])])
def test_a_rank_that_is_killed_costs_no_bit(name, quiet, tmp_path):
    options = ["--epochs", "3", "--go-on", "--log-dir", str(tmp_path / "logs")]
    text = Job(tmp_path, FAULTS[name], *options).end()
    assert "was killed by SIGKILL" in text
    assert last(tmp_path) == quiet(3)
    if name == "a step":  # a line and a metric, before another rank has come
        assert "process 1 was killed by SIGKILL: going on with 2 ranks; " in text
        assert "going on with 2 ranks in epoch 1, step 5: another group after " in text
        lines = map(json.loads, (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines())
        event, *_ = [line for line in lines if "ranks" in line]
        assert (event["step"], event["ranks"]) == (5, 2)
        assert event.keys() == {"step", "ranks", "group_seconds", "step_seconds"}


@pytest.mark.slow
def test_a_mistake_is_said_once(tmp_path):
    text = Job(tmp_path, "", "--go-on", "--log-dir", "/etc/hostname/x").end(code=2)
    assert text.startswith("error: cannot write metrics to ")
    assert len(text.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a rank", "the supervisor"])
def test_a_run_that_goes_on_can_be_stopped_and_resumed(who, quiet, tmp_path):
    # The supervisor is the parent of the process that ranks are forked from.
    parent = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
    pid = "os.getpid()" if who == "a rank" else parent
    stop = f"before('_step', lambda t: me == '1' and t.global_step == 7 and os.kill({pid}, 15))"
    text = Job(tmp_path, stop, "--epochs", "3", "--go-on").end(code=143)
    assert "stopped in epoch 2, step " in text
    assert "going on" not in text
    Job(tmp_path, "", "--epochs", "3", "--go-on", "--resume", "auto", nproc=4).end()
    assert last(tmp_path) == quiet(3)


# Several machines ---------------------------------------------------------------------------------


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts one more machine of 2 ranks, or one of them again."""
    monkeypatch.setenv("DDP_SECRET", "a" * 16)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with ExitStack() as stack:

        def begin(node, fault, *options, nproc="2,2", address="127.0.0.1", on=()):
            every = ["--go-on", "--master-addr", address, "--master-port", port]
            mine = [*every, "--node-rank", str(node), *options]
            job = Job(tmp_path, fault, *mine, nproc=nproc, on=on)
            stack.callback(job.process.wait)
            stack.callback(job.process.kill)
            return job

        yield begin


@pytest.mark.slow
def test_an_option_that_differs_is_named_once(begin):
    zero, one = (begin(node, "", "--lr", lr) for node, lr in enumerate(("0.1", "0.2")))
    assert zero.end(2) + one.end(2) == (
        "error: --lr is 0.1 on rank 0 and 0.2 on rank 2: it must be the same on all ranks\n"
    )


# Steps in which the ranks wait, so that the run cannot end before the machines have come: until a
# process of such a number trains with the others, or until the test has left a file.
HOLD = """
from ddp_from_scratch.launch.board import Board
board = Board(Path(os.environ["DDP_BOARD"]))
enough = Path(sys.argv[0]).parent / "enough"
def has_come(member):
    return max(board.members(board.generation)) >= member
until = {7: lambda: has_come(4), 10: lambda: has_come(6), 13: enough.exists}
def hold(trainer):
    while not until.get(trainer.global_step, lambda: True)():
        time.sleep(0.01)
before("_step", hold)
"""


@pytest.mark.slow
def test_a_machine_that_is_lost_comes_again_and_another_one_joins(begin, quiet, tmp_path):
    epochs = ["--epochs", "3"]
    first, second = (begin(node, HOLD, *epochs) for node in range(2))
    first.wait_for("epoch   1/3")
    second.process.kill()
    again = begin(1, HOLD, *epochs)
    wrong = begin(1, HOLD, *epochs, "--lr", "0.2")  # not the command that the job was started with
    first.wait_for("going on with 4 ranks in epoch ")
    third = begin(2, HOLD, *epochs, nproc="2,2,2")
    first.wait_for("going on with 6 ranks in epoch ")
    fourth = begin(3, HOLD, *epochs, nproc="2,2,2,3")  # more ranks than shards
    assert wrong.end(2) == "error: --lr is 0.2 here and 0.05 on machine 0\n"
    fourth.end(2)
    (tmp_path / "enough").touch()
    text = first.end()
    again.end()
    third.end()
    for told in (
        *("machine 1 has not answered for 5 s: its ranks are lost", "machine 2 has come\n"),
        *("process 3 was on machine 1: going on with 2 ranks", "machine 1 has come again"),
    ):
        assert told in text
    assert last(tmp_path) == quiet(3)


@pytest.mark.slow
def test_a_cable_is_pulled_and_put_back(begin, quiet, tmp_path):
    why = missing()
    if why is not None:
        pytest.skip(why)
    slowly = "before('_step', lambda t: time.sleep(0.25))"
    with two_hosts() as hosts:

        def cable(state):
            at = ["ip", "-n", hosts[1].name, "link", "set", "wire", state]
            subprocess.run(at, check=True)

        # The ranks that are lost with their machine are none of these failures.
        options = ["--epochs", "13", "--max-failures", "0"]
        first, second = (
            begin(node, slowly, *options, address=hosts[0].address, on=hosts[node].command())
            for node in range(2)
        )
        first.wait_for("epoch   1/13")
        cable("down")
        first.wait_for("going on with 2 ranks in epoch ")
        second.wait_for("machine 0 has not answered for 5 s: ending the ranks here")
        cable("up")
        first.wait_for("going on with 4 ranks in epoch ")
        assert "machine 1 answers again" in first.end()
        second.end()
    assert last(tmp_path) == quiet(13)
