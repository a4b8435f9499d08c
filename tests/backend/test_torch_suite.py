"""PyTorch's own distributed tests, from the installed wheel, pass on the mpi backend."""

import importlib.util
import re
from collections import Counter

import pytest
import torch.distributed as dist

RANKS = 4  # for which most of them are made
AT_LEAST = 115  # so that a torch which skips everything is noticed; 132 with torch 2.15

# torch's reasons to skip a test that have nothing to do with this backend.
REASONS = re.compile(
    r"accelerator|GPU|CUDA|cuda|N(CCL|ccl)|nccl|world size|fail(ing|s)|flak"
    r"|github.com/pytorch/pytorch/issues"
)


def run(world, folder):
    from tests.support import torch_suite  # starts MPI

    dist.destroy_process_group()
    return torch_suite.run(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs expecttest")
def test_torchs_own_tests(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for part in ("barrier", "test_dir", "init_dir"):
        (tmp_path / part).mkdir()
    found = ranks("mpi", RANKS, fresh=True)(run, tmp_path, limit=250)
    for name in found[0]:
        ended = [of_rank[name] for of_rank in found]
        assert all(state in ("pass", "skip", "excluded") for state, _ in ended), (name, ended)
        assert all(state != "skip" or REASONS.search(why) for state, why in ended), (name, ended)
    assert Counter(state for state, _ in found[0].values())["pass"] >= AT_LEAST
