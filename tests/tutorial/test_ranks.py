"""Ranks of the tutorial's programs start, answer, and end together."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import ROOT
from tutorial.ranks import start


def total(number):
    tensor = torch.tensor([number * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor, dist.get_world_size(), torch.get_num_threads()


def test_results_come_in_order_of_rank():
    for tensor, size, threads in start(total, 3, 10):
        assert (tensor.item(), size, threads) == (60, 3, 1)


def fail_on_rank_1(how):
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("a sentence\nand another")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # for a rank that never comes


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("raises", r"^rank 1: ValueError: a sentence \(test_ranks.py, line \d+\)$"),
        ("is killed", r"^rank 0: .*waited for another rank in vain|^rank 1: its process ended"),
    ],
)
def test_an_exception_ends_all_ranks_with_one_line(how, line):
    with pytest.raises(SystemExit, match=line) as end:
        start(fail_on_rank_1, 2, how)
    assert "\n" not in str(end.value)


WAITS_FOREVER = """
import os, time
from tutorial.ranks import start

def wait():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)

if __name__ == "__main__":
    start(wait, 2)
"""


@pytest.mark.slow
def test_ctrl_c_stops_all(tmp_path):
    (tmp_path / "program.py").write_text(WAITS_FOREVER)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        # Ignored where the tests themselves run in a shell's background; Python would keep that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as program:
        pids = [int(program.stdout.readline()) for _ in range(2)]
        os.killpg(program.pid, signal.SIGINT)
        # The end of its output: no process is left that holds it.
        output, errors = program.communicate(timeout=20)
    assert (program.returncode, output, errors) == (130, "", "")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
