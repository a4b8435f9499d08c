"""Ranks of the tutorial's programs start, answer, and end together."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tutorial.ranks import start

pytestmark = pytest.mark.program


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
        ("is killed", r"^rank 0: .*another rank did not answer|^rank 1: its process ended"),
    ],
)
def test_an_exception_ends_all_ranks_with_one_line(how, line):
    with pytest.raises(SystemExit, match=line) as end:
        start(fail_on_rank_1, 2, how)
    assert "\n" not in str(end.value)
