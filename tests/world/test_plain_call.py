"""`process_group` without `with`: open at once, closed when Python ends, and asked for twice."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

import ddp_from_scratch as ddp
from tests.support.ranks import MPIRUN, ROOT
from tests.support.tiers import slow

PROGRAM = """
    import atexit
    import sys

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp

    atexit.register(lambda: print(f"open at exit: {dist.is_initialized()}\\n", end=""))
    world = ddp.process_group(sys.argv[1])  # its handler runs before the one above
    total = torch.full((1,), world.rank + 1.0)
    dist.all_reduce(total)
    assert total == 3
    assert ddp.process_group(sys.argv[1]) is world
    if world.rank == int(sys.argv[2]):
        raise ValueError("on purpose")
    if sys.argv[2] != "-1":
        dist.barrier()
"""
START = "import sys, ddp_from_scratch as ddp; sys.exit(ddp.start_ranks(sys.argv[1:], (2,)))"
LAUNCHERS = {"gloo": [sys.executable, "-c", START], "mpi": ["mpirun", "-n", "2"]}


def run(backend: str, failing: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            *LAUNCHERS[backend],
            *(sys.executable, "-c", textwrap.dedent(PROGRAM), backend, str(failing)),
        ],
        env=os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_is_closed_at_exit(backend: str) -> None:
    done = run(backend, -1)
    assert (done.returncode, done.stdout) == (0, 2 * "open at exit: False\n"), done.stderr


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_ends_after_an_exception(backend: str) -> None:
    done = run(backend, 1)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("ValueError: on purpose") == 1, done.stderr


def test_a_second_call_returns_the_same_world() -> None:
    first = ddp.process_group("gloo")
    assert ddp.process_group("gloo") is first
    with ddp.process_group("gloo") as world:  # from here on it is closed by the block
        assert world is first
        # A group that a block closes is nobody else's: torch says so, as ever.
        with pytest.raises(ValueError, match="twice"):
            ddp.process_group("gloo")
    assert not dist.is_initialized()


def test_a_group_that_was_closed_by_hand_is_opened_again() -> None:
    first = ddp.process_group("gloo")
    dist.destroy_process_group()
    with ddp.process_group("gloo") as second:
        assert second is not first
        assert second == first
    assert not dist.is_initialized()
