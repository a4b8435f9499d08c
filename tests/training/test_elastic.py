"""`run.py --elastic`: ranks and machines are lost, and the checkpoint stays the same."""

import json
import re
import socket
import sys
from contextlib import ExitStack

import pytest

from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.settings import Settings
from tests.support.failing_run import Run
from tests.support.tiers import slow
from tests.training.test_resume import contents

# As run.py, but for a part of the trainer that is replaced first, on each rank.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.main import main

me = os.environ.get("DDP_MEMBER")
if me is not None:
    from ddp_from_scratch.training.loop import Trainer, torch

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(name, fault, owner=Trainer):
        method = getattr(owner, name)
        def replacement(*args, **options):
            fault(args[0])
            return method(*args, **options)
        setattr(owner, name, replacement)

    exec(os.environ["FAULT"])
run_to_exit(lambda: main([sys.argv[0]], sys.argv[1:]))
"""


def job(folder, fault="", *options, nproc=3, **environ):
    """A run of 256 digits a step, 5 steps an epoch."""
    program = folder / "program.py"
    if not program.exists():  # ranks of another machine may be reading it
        program.write_text(PROGRAM)
    command = [sys.executable, str(program), "--nproc", str(nproc), "--virtual-ranks", "8"]
    command += ["--checkpoint-dir", str(folder / "checkpoints"), *options]
    return Run(*command, FAULT=fault, **environ)


def end(run, code=0):
    """Its output, once it has ended with this code."""
    assert run.wait() == code, run.text
    return run.text


def train(world, folder):
    Trainer(Settings(epochs=3, virtual_ranks=8, checkpoint_dir=folder, quiet=True), world).run()


@pytest.fixture(scope="module")
def quiet(ranks, tmp_path_factory):
    """The last checkpoint of a run on one rank, without --elastic."""
    folder = tmp_path_factory.mktemp("quiet")
    ranks("gloo", 1)(train, folder / "checkpoints")
    return contents(folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ([], "starting another (failure 1 of 3)"),
        (["--no-replace-wrong"], "it computed wrongly, and is not replaced"),
    ],
)
def test_a_rank_that_computes_wrongly_leaves(option, told, tmp_path, quiet):
    fault = """
if me == "1":
    from ddp_from_scratch.training import loop
    right = loop.cross_entropy
    loop.cross_entropy = lambda outputs, labels: right(outputs * (1 + 2**-22), labels)
"""
    with job(tmp_path, fault, "--elastic", "--recheck", "1", "--epochs", "3", *option) as run:
        text = end(run)
    assert "rank 1 on " in text
    assert " computes wrongly: in step 0, the gradient of " in text
    assert f"process 1 ended with exit code 1: continuing with 2 ranks; {told}" in text
    assert re.search(r"^rechecked [1-9]\d* steps, all without a fault$", text, re.M)
    assert contents(tmp_path / "checkpoints") == quiet


FAULTS = {
    # When all are in the step.
    "a step": """
here = Path(sys.argv[0]).parent
def die_with_all_in_step_4(trainer):
    if trainer.global_step == 4:
        (here / f"rank {me}").touch()
        while me == "1":
            if len([*here.glob("rank *")]) == 3:
                die()
            time.sleep(0.01)
before("_backward", die_with_all_in_step_4)
""",
    "in the last checkpoint": """
save = torch.save
def half(state, file):
    save(state, file)
    if me == "0" and isinstance(state, dict) and state.get("epoch") == 3:
        file.flush()
        die()
torch.save = half
""",
    "the first meeting": """
before("_on_regroup", lambda trainer: me == "1" and die())
""",
}


@pytest.mark.parametrize("name", ["a step", *(slow(name) for name in list(FAULTS)[1:])])
def test_a_rank_that_is_killed_costs_no_bit(name, quiet, tmp_path):
    options = ["--epochs", "3", "--elastic", "--log-dir", str(tmp_path / "logs")]
    with job(tmp_path, FAULTS[name], *options) as run:
        text = end(run)
    assert "was killed by SIGKILL" in text
    assert contents(tmp_path / "checkpoints") == quiet
    if name == "the first meeting":  # nobody had trained
        assert "continuing with 2 ranks in epoch" not in text
    if name == "a step":  # a line and a metric, before another rank joins
        assert "process 1 was killed by SIGKILL: continuing with 2 ranks; " in text
        assert "continuing with 2 ranks in epoch 1, step 5: new group after " in text
        lines = map(json.loads, (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines())
        event, *_ = [line for line in lines if "ranks" in line]
        assert (event["step"], event["ranks"]) == (5, 2)
        # The others had 2 and 3 virtual ranks, and each finished all but the last.
        assert event["kept_virtual_ranks"] == 3
        assert "ms later (3 of its 8 virtual ranks were kept)" in text


# The agent is the parent of the process that ranks are forked from.
AGENT = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "step", "at"),
    [("os.getpid()", "_step", 7), (AGENT, "_step", 7), ("os.getpid()", "_evaluate", 10)],
    ids=["a rank", "the agent", "in an evaluation"],
)
def test_an_elastic_run_can_be_stopped_and_resumed(who, step, at, quiet, tmp_path):
    stop = f"before('{step}', lambda t: me == '1' and t.global_step == {at} and os.kill({who}, 15))"
    with job(tmp_path, stop, "--epochs", "3", "--elastic") as run:
        text = end(run, 143)
    assert "stopped in epoch 2, step " in text
    assert "continuing" not in text
    with job(tmp_path, "", "--epochs", "3", "--elastic", "--resume", "auto", nproc=4) as run:
        end(run)
    assert contents(tmp_path / "checkpoints") == quiet


# Steps in which ranks wait until so many have joined, or until the test has left a file. All of a
# machine's ranks, which may come one by one, must be there before the next such step.
HOLD = """
from ddp_from_scratch.world.elastic import job_store
store = job_store()
def have_come(count):
    return sum(member > 3 for member in store.generation.members) >= count
enough = (Path(sys.argv[0]).parent / "enough").exists
until = {7: lambda: have_come(2), 10: lambda: have_come(4), 13: enough}
def hold(trainer):
    while not until.get(trainer.global_step, lambda: True)():
        time.sleep(0.01)
before("_step", hold)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_machine_rejoins_and_another_one_joins(quiet, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with ExitStack() as stack:

        def begin(node, *options, nproc="2,2"):
            every = ["--elastic", "--epochs", "3", "--master-addr", "127.0.0.1"]
            mine = [*every, "--master-port", port, "--node-rank", str(node), *options]
            run = job(tmp_path, HOLD, *mine, nproc=nproc, DDP_SECRET="a" * 16)
            return stack.enter_context(run)

        def wait_for(text):
            first.wait_for(text, 120.0)  # agents and their ranks start on however few cores

        first, second = (begin(node) for node in range(2))
        wait_for("epoch   1/3")
        second.process.kill()
        again = begin(1)
        wrong = begin(1, "--lr", "0.2")  # not the command that the job was started with
        wait_for("continuing with 4 ranks in epoch ")
        third = begin(2, nproc="2,2,2")
        wait_for("continuing with 6 ranks in epoch ")
        fourth = begin(3, nproc="2,2,2,3")  # more ranks than virtual ranks
        assert "error: --lr is 0.2 here and 0.05 on machine 0\n" in end(wrong, 2)
        end(fourth, 2)
        (tmp_path / "enough").touch()
        text = end(first)
        end(again)
        end(third)
    for told in (
        *("machine 1 has not answered for 5 s: its ranks are lost", "machine 2 joined\n"),
        *("process 3 was on machine 1: continuing with 2 ranks", "machine 1 rejoined"),
    ):
        assert told in text
    assert contents(tmp_path / "checkpoints") == quiet
