"""A group is closed while collectives are under way in it."""

import sys

from ddp_from_scratch import start_ranks

# Rank 1 drops a receive before its message comes. From then on gloo reads nothing more from rank 0,
# not even that it has gone.
PROGRAM = """
import os, sys, time, threading
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
import ddp_from_scratch as ddp
from ddp_from_scratch.elasticity.closing import close_default_group

out = Path(sys.argv[1])

def wait_for(name):
    until = time.monotonic() + 30
    while not (out / name).exists():
        assert time.monotonic() < until, name
        time.sleep(0.01)

with ddp.process_group("gloo") as world:
    if world.rank == 0:
        wait_for("dropped")
        dist.isend(torch.ones(1000), 1, tag=7)
        dist.all_reduce(torch.zeros(1), async_op=True)
        (out / "sent").touch()
        wait_for("closed")
        try:
            dist.recv(torch.zeros(1), 1, tag=8)
        except RuntimeError as error:
            (out / "noticed").write_text(str(error))
    else:
        received = dist.irecv(torch.zeros(1000), 0, tag=7)
        del received
        (out / "dropped").touch()
        wait_for("sent")
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        close_default_group()
        (out / "closed").touch()
        try:
            work.wait(timedelta(seconds=30))
        except RuntimeError as error:
            (out / "broken off").write_text(str(error))
        for thread in threading.enumerate():
            if "_close" in thread.name:
                thread.join(30)
                assert not thread.is_alive()
os._exit(0)
"""


def test_what_is_under_way_is_broken_off_on_both_sides(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert start_ranks([sys.executable, str(program), str(tmp_path)], [2]) == 0
    assert "Application timeout" in (tmp_path / "broken off").read_text()
    assert "by peer" in (tmp_path / "noticed").read_text()
