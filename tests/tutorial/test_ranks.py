"""Ranks of the tutorial's programs start, answer, and end together."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tutorial.ranks import _describe, start


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


@pytest.mark.parametrize(
    "ending",
    [
        "Timed out waiting 15000ms for recv operation to complete",
        "Connection closed by peer [127.0.0.1]:29051",
        "Read error [127.0.0.1]:10982: Connection reset by peer. This is typically caused by",
        "writev [127.0.0.1]:29051: Broken pipe",
    ],
)
def test_what_gloo_says_of_a_lost_rank_is_one_sentence(ending):
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(f"[gloo/transport/tcp/pair.cc:545] {ending}")
    assert "waited for another rank in vain" in _describe(raised.value)
