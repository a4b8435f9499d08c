"""Runs PyTorch's own distributed tests, out of the installed wheel, on the mpi backend.

Every rank runs the same tests in the same order in one process, each with a default group of its
own. A test that fails ends the run, since ranks can no longer be taken to be in step.

torch decides when `distributed_test` is imported, by the name in BACKEND, which tests a backend
gets. A test that it withholds from the name "mpi" for what its own MPI backend cannot do is taken
from a second import, under the name "gloo"; both then run on this backend.
"""

import importlib.util
import inspect
import os
import sys
import unittest
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from ddp_from_scratch.backend.mpi_transport import MPI
from tests.support.torch_ddp_suite import outcome, suite_of

GROUP_TIMEOUT = timedelta(seconds=20)

# What does not apply to this backend, and why. (What torch itself skips comes on top: it needs
# GPUs or nccl, or another number of ranks, or is known to fail for torch.)
EXCLUDED = {
    "test_monitored_barrier_gloo_rank_0_timeout": "a limit of 0 s means none to gloo alone; here, "
    "as for nccl's handles, the group's own",
    "test_sparse_all_reduce_sum": "sparse tensors are gloo's and nccl's alone",
}
if mpi.BACKEND != "mpi":  # an older torch
    for test in ("test_get_backend", "test_ddp_logging_data_cpu"):
        EXCLUDED[test] = f"asks for the name mpi, where this torch has {mpi.BACKEND}"
    for test in ("failure_order", "gloo", "gloo_subgroup", "wait_all_ranks"):
        EXCLUDED[f"test_monitored_barrier_{test}"] = "this torch has that for gloo alone"

# torch skips these without GPUs, on Linux or everywhere, though nothing in them needs a GPU. They
# are made for 4 ranks.
ON_CPU = [
    "test_broadcast_object_list",
    *(
        f"test_new_subgroups{case}"
        for case in (
            *("", "_group_size_exceeds_world_size", "_overlap_not_allowed", "_with_group_param"),
            "_by_enumeration_input_rank_exceeds_world_size",
            "_by_enumeration_negative_input_rank",
            "_world_size_not_divisible_by_group_size",
        )
    ),
]


def load(backend: str) -> ModuleType:
    """torch's module of tests, imported as for `backend`, then turned to ours."""
    os.environ["BACKEND"] = backend
    found: Any = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    # A name of its own: tests pickle objects of the module's classes.
    name = f"distributed_test_{backend}"
    spec: Any = importlib.util.spec_from_file_location(name, found.origin)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["BACKEND"] = "mpi"  # what its tests ask for when they run
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        module.__dict__[name] = []  # Python cannot give a range its tensors' shapes
    return module


def reason_withheld(test: Any) -> str:
    """Why a decorator of torch's refuses the test for this backend; empty when none does."""
    return str(getattr(test, "__unittest_skip_why__", ""))


def run(folder: Path) -> dict[str, tuple[str, str]]:
    """How each test has ended on this rank, and why."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ |= {"WORLD_SIZE": str(size), "TEMP_DIR": str(folder), "RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "INIT_METHOD": f"file://{folder}/rendezvous"}
    barrier = MPI.COMM_WORLD.Dup().Barrier  # apart from the agreement at the end of each test
    suites = {backend: suite_of(load(backend), barrier) for backend in ("mpi", "gloo")}
    for suite, name in product(suites.values(), ON_CPU):
        setattr(suite, name, inspect.unwrap(getattr(suite, name)))
    os.environ["BACKEND"] = "mpi"  # for tests that skip gloo
    found: dict[str, tuple[str, str]] = {}
    for name in unittest.TestLoader().getTestCaseNames(suites["mpi"]):
        suite, why = suites["mpi"], reason_withheld(getattr(suites["mpi"], name))
        if why:
            suite, why = suites["gloo"], reason_withheld(getattr(suites["gloo"], name))
        if name in EXCLUDED:
            found[name] = "excluded", EXCLUDED[name]
        elif why:
            found[name] = "skip", why
        else:
            found[name] = run_one(suite, name, rank)
            if "fail" in MPI.COMM_WORLD.allgather(found[name][0]):
                break
    return found


def run_one(suite: type[unittest.TestCase], name: str, rank: int) -> tuple[str, str]:
    options: dict[str, Any] = {"timeout": GROUP_TIMEOUT}
    if mpi.BACKEND != "mpi":  # an older torch wants a store and a rank for every name but "mpi"
        options |= {"store": dist.HashStore(), "rank": rank, "world_size": MPI.COMM_WORLD.size}
    dist.init_process_group(mpi.BACKEND, **options)
    case: Any = suite(name)
    case.rank = rank
    torch.manual_seed(0)
    state, why = outcome(case, name)
    if state != "fail" and dist.is_initialized():
        MPI.COMM_WORLD.Barrier()
        dist.destroy_process_group()
    return state, why
