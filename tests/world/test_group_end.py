"""Nothing of a group is left when it has been closed: no reference, and no thread of gloo's.

A thread that lets go of a tensor while Python ends aborts the process, after its work was done.
"""

import os
import socket
import subprocess
import sys
import textwrap
from itertools import product

import pytest

from tests.support.failing_run import Run
from tests.support.ranks import MPIRUN, ROOT
from tests.support.tiers import slow

TRAIN = """
    import glob
    import pathlib
    import weakref

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp

    def threads():
        names = [pathlib.Path(name).read_text() for name in glob.glob("/proc/self/task/*/comm")]
        return sum("gloo" in name for name in names)

    def train():
        global group, model, optimizer, reducer
        group = weakref.ref(dist.group.WORLD)
        model = torch.nn.Linear(3, 3)
        ddp.broadcast_parameters(model)
        {make}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with ddp.join(reducer, enable={joins}):
                if not {joins}:
                    reducer.weight(2)
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        ddp.check_sync(model, optimizers=[optimizer])
        assert threads() > 0
"""
OPENED = {
    "by process_group": """
    with ddp.process_group("gloo"):
        train()
    """,
    "by init_process_group": """
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    train()
    dist.destroy_process_group()
    """,
}


MADE = [
    "reducer = ddp.Reducer(model, stall_after=30, find_unused_parameters=True)",
    "reducer = ddp.Reducer(model)",
    "model = ddp.DistributedDataParallel(model); reducer = model.reducer",
]
FIRST = [("by process_group", MADE[2], True)]
REST = [case for case in product(OPENED, MADE, (False, True)) if case not in FIRST]
AGAIN = """
    import sys

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp

    for number in range(3):
        with ddp.process_group(sys.argv[1]) as world:
            total = torch.full((1,), world.rank + 1.0)
            dist.all_reduce(total)
            assert total == 3
    if world.rank == 0:
        print("clean")
"""
START = (
    "import sys, ddp_from_scratch as ddp; "
    "sys.exit(ddp.start_ranks([sys.executable, *sys.argv[1:]], (2,)))"
)
# Programs in a folder of their own find the package here, installed or not.
ENVIRONMENT = os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)}
LAUNCHERS = {
    "start_ranks": [sys.executable, "-c", START],
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "-n", "2", sys.executable],
}


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        slow("start_ranks", "gloo"),
        slow("torchrun", "gloo"),
        slow("mpirun", "gloo"),
        ("mpirun", "mpi"),
    ],
)
def test_a_group_may_be_opened_again(launcher, backend, tmp_path):
    file = tmp_path / "again.py"
    file.write_text(textwrap.dedent(AGAIN))
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(file), backend],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    assert (done.stdout, done.returncode) == ("clean\n", 0), done.stderr


MACHINE = (
    "import sys, ddp_from_scratch as ddp; node, port, *file = sys.argv[1:]; "
    "command = [sys.executable, *file, 'gloo']; "
    "sys.exit(ddp.start_ranks(command, (1, 1), int(node), '127.0.0.1', int(port), 30.0))"
)


@pytest.mark.slow
def test_a_group_may_be_opened_again_on_two_machines(tmp_path):
    file = tmp_path / "again.py"
    file.write_text(textwrap.dedent(AGAIN))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    secret = {"DDP_SECRET": "known to both machines", "PYTHONPATH": str(ROOT)}
    with (
        Run(sys.executable, "-c", MACHINE, "0", port, str(file), **secret) as zero,
        Run(sys.executable, "-c", MACHINE, "1", port, str(file), **secret) as one,
    ):
        assert (zero.wait(), one.wait()) == (0, 0), f"{zero.text}\n{one.text}"
        assert (zero.out, one.out) == ("clean\n", "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("opened", "make", "joins"), FIRST + [slow(*case) for case in REST])
def test_no_thread_is_left(opened, make, joins):
    end = """
    assert group() is None, "somebody holds the group"
    assert threads() == 0, "gloo's threads live on"
    print("clean")
    """
    program = "".join(
        textwrap.dedent(part)
        for part in (TRAIN.format(make=make, joins=joins), OPENED[opened], end)
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("clean\n", 0), done.stderr
