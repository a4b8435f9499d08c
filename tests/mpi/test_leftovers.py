"""Files of an MPI job: however it ends, none of ours is left behind."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.failing_run import Run

PROGRAM = """
import os, signal, sys, torch
import torch.distributed as dist
import ddp_from_scratch as ddp

with ddp.process_group("mpi") as world:
    some = dist.new_group(backend="gloo")  # meets through the same store
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=some)
    assert tensor.item() == world.world_size
    if world.rank == int(sys.argv[2]):
        if sys.argv[1] == "raise":
            raise ValueError("on purpose")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    late = dist.new_group(backend="gloo")
    dist.all_reduce(tensor, group=late)
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "rank", "code"), [("end", 0, 0), ("raise", 1, 1), ("raise", 0, 1), ("kill", 0, 137)]
)
def test_nothing_is_left(how: str, rank: int, code: int, tmp_path: Path) -> None:
    program, temporary = tmp_path / "program.py", tmp_path / "tmp"
    program.write_text(PROGRAM)
    temporary.mkdir()
    command = ["mpirun", "-n", "2", sys.executable, str(program), how, str(rank)]
    with Run(*command, TMPDIR=str(temporary)) as run:
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        assert run.out.count("done") == (2 if code == 0 else 0)
    assert list(temporary.rglob("ddp-*")) == []


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small /dev/shm")
def test_a_small_shared_memory_will_do(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = f"mpirun -n 2 {sys.executable} {program} end 0"
    mount = "mount -t tmpfs -o size=32m none /dev/shm"
    with Run("unshare", "-m", "sh", "-c", f"{mount} && {job} && ls /dev/shm") as run:
        assert run.wait() == 0, run.text
        assert sorted(run.out.split()) == ["done", "done"]
