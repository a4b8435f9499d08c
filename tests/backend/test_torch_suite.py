"""PyTorch's own distributed tests, from the installed wheel, pass on the mpi backend.

torch decides by the name in BACKEND, at the import, which tests a backend gets. What it withholds
from "mpi" is taken from a second import, under "gloo"; both then run on this backend.
"""

import importlib.util
import os
import re
import sys
import unittest
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from tests.support.torch_ddp_suite import MODULE, outcome, suite_of

RANKS = 4  # for which most of them are made
AT_LEAST = 110  # so that a torch which skips everything is noticed; 126 with torch 2.15
TEST_LIMIT_S = 30.0
GROUP_TIMEOUT = timedelta(seconds=20)

# What does not apply to this backend, and why; torch itself skips others.
EXCLUDED = {
    "monitored_barrier": "gloo's alone; here every collective names the ranks that it waits for",
    "test_sparse_all_reduce_sum": "sparse tensors are gloo's and nccl's alone",
}

# torch's reasons to skip a test that have nothing to do with this backend.
REASONS = re.compile(
    r"accelerator|GPU|CUDA|cuda|N(CCL|ccl)|nccl|world size|fail(ing|s)|flak"
    r"|github.com/pytorch/pytorch/issues"
)


@cache
def suite_for(backend):
    """torch's tests, imported as for `backend`, then turned to ours."""
    os.environ["BACKEND"] = backend
    # A name of its own: tests pickle objects of the module's classes.
    name = f"distributed_test_{backend}"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(MODULE).origin)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["BACKEND"] = module.__dict__["BACKEND"] = "mpi"  # what its tests ask for
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        module.__dict__[name] = []  # Python cannot give a range its tensors' shapes
    return suite_of(module, mpi.MPI.COMM_WORLD.Dup().Barrier)


def reason_withheld(test):
    return getattr(test, "__unittest_skip_why__", "")


def prepare(world, folder):
    """Closes the crew's group, since each test has one of its own; the tests' names."""
    dist.destroy_process_group()
    os.environ |= {"WORLD_SIZE": str(world.world_size), "TEMP_DIR": folder, "RANK": str(world.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "INIT_METHOD": f"file://{folder}/rendezvous"}
    for part in ("barrier", "test_dir", "init_dir"):
        Path(folder, part).mkdir(exist_ok=True)
    suites = [suite_for(backend) for backend in ("mpi", "gloo")]
    return unittest.TestLoader().getTestCaseNames(suites[0])


def run(world, name):
    """Why torch skips the test; "" where it has passed."""
    suite = suite_for("mpi")
    if reason_withheld(getattr(suite, name)):
        suite = suite_for("gloo")
    why = reason_withheld(getattr(suite, name))
    if why:
        return why
    dist.init_process_group(mpi.BACKEND, timeout=GROUP_TIMEOUT)
    case = suite(name)
    case.rank = world.rank
    torch.manual_seed(0)
    state, why = outcome(case, name)
    assert state != "fail", why
    if dist.is_initialized():
        mpi.MPI.COMM_WORLD.Barrier()
        dist.destroy_process_group()
    return why


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.__version__ < "2.14", reason='torch takes no backend by the name "mpi"')
@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs expecttest")
def test_torchs_own_tests(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # before torch looks for one
    crew = ranks("mpi", RANKS, fresh=True)
    names, *_ = crew(prepare, str(tmp_path))
    names = [name for name in names if not any(part in name for part in EXCLUDED)]
    found = {name: crew(run, name, limit=TEST_LIMIT_S) for name in names}
    for name, skipped in found.items():
        assert all(why == "" or REASONS.search(why) for why in skipped), (name, skipped)
    assert sum(skipped == [""] * RANKS for skipped in found.values()) >= AT_LEAST
