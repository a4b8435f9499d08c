"""A program that a rank starts is told that it is no rank, whenever and however it was started."""

import os
import subprocess
import sys

import pytest

from tests.support.failing_run import LAUNCHERS, MACHINE, Run
from tests.support.tiers import slow

pytestmark = [
    pytest.mark.program,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

# Both without torch, so that they start at once: `process_group` claims the rank first of all.
CHILD = """
import sys
from ddp_from_scratch.launch.claim import claim_rank
from ddp_from_scratch.launch.rank_process import run_to_exit
sys.stdin.read()
run_to_exit(lambda: claim_rank() or 0)
"""
PROGRAM = """
import os, subprocess, sys
import ddp_from_scratch as ddp
from ddp_from_scratch.launch.claim import claim_rank

def start(environ=None, before=()):
    command = [*before, sys.executable, "-c", sys.argv[2]]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

how = sys.argv[1]
inherited = dict(os.environ)
child = start() if how == "before" else None
claim_rank()
claim_rank()  # for a second group of this process
if how == "after":
    child = start()
elif how == "shell":
    child = start(before=["sh", "-c", '"$@"; exit $?', "sh"])
elif how == "copy":
    child = start(inherited)
elif how == "clean":
    child = start(ddp.environment_without_rank())
elif how == "other":
    child = start(os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1234"})
_, err = child.communicate("")
told = f"error: this process has inherited the rank of process {os.getpid()}, "
assert (child.returncode, err[:len(told)], err.count("\\n")) in [(0, "", 0), (2, told, 1)], err
print(f"{child.returncode}\\n", end="", flush=True)
"""
HOW = {"before": 2, "after": 2, "shell": 2, "copy": 2, "clean": 0, "other": 0}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
BY_SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def child_of(how, **environ):
    command = [sys.executable, "-c", PROGRAM, how, CHILD]
    variables = os.environ | MACHINE | environ
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


@pytest.mark.parametrize("how", HOW)
def test_a_program_that_a_rank_starts(how):
    # Also of a rank whose errors wait for those of the first rank.
    assert child_of(how, **BY_HAND) == HOW[how]


@pytest.mark.parametrize("how", ["before", "after", "clean"])
def test_a_program_that_a_rank_of_srun_starts(how):
    assert child_of(how, **BY_SRUN) == HOW[how]


def test_without_a_launcher_and_in_a_world_of_one_a_program_is_alone_anyway():
    assert child_of("after") == 0
    assert child_of("after", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1") == 0
    # A process of an elastic job begins in a world of one.
    assert child_of("after", RANK="0", WORLD_SIZE="1", DDP_MEMBER="3") == 2


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        slow("start_ranks", "before"),
        ("start_ranks", "clean"),
        ("mpirun", "after"),
        ("mpirun", "clean"),
        slow("torchrun", "after"),
    ],
)
def test_a_program_that_a_rank_of_a_launcher_starts(launcher, how, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with Run(*LAUNCHERS[launcher], str(file), how, CHILD) as run:
        assert run.wait() == 0, run.text
        assert run.out == f"{HOW[how]}\n" * 2
