"""Runs PyTorch's own distributed tests, out of the installed wheel, on the mpi backend.

    mpirun -n 3 python tests/support/torch_suite.py FOLDER

Every rank runs the same tests in the same order in one process, each with a default group of its
own. Rank r writes `FOLDER/r.jsonl`, a line when a test begins and one when it has ended. A test
that fails or hangs ends the run, with the stacks of every thread on stderr.

torch decides by the name in BACKEND, at the import, which tests a backend gets. What it withholds
from "mpi" is taken from a second import, under "gloo"; both then run on this backend.
"""

import faulthandler
import importlib.util
import inspect
import json
import os
import sys
import unittest
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for one

import torch
import torch.distributed as dist

from ddp_from_scratch import mpi
from ddp_from_scratch.backend.mpi_group import MPI
from tests.support.torch_ddp_suite import outcome, suite_of

TEST_LIMIT_S = 30  # for one test; then its stacks are printed and the run ends
GROUP_TIMEOUT = timedelta(seconds=20)

# What does not apply to this backend, and why; torch itself skips others.
EXCLUDED = {
    "test_monitored_barrier_gloo_rank_0_timeout": "a limit of 0 s means none to gloo alone; here, "
    "as for nccl's handles, the group's own",
    "test_sparse_all_reduce_sum": "sparse tensors are gloo's and nccl's alone",
}

# torch skips these without GPUs, though nothing in them needs one. They are made for 4 ranks.
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
    return str(getattr(test, "__unittest_skip_why__", ""))


def run(folder: Path) -> bool:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ |= {"WORLD_SIZE": str(size), "TEMP_DIR": str(folder), "RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "INIT_METHOD": f"file://{folder}/rendezvous"}
    barrier = MPI.COMM_WORLD.Dup().Barrier  # apart from the agreement at the end of each test
    suites = {backend: suite_of(load(backend), barrier) for backend in ("mpi", "gloo")}
    for suite, name in product(suites.values(), ON_CPU if size == 4 else ()):
        setattr(suite, name, inspect.unwrap(getattr(suite, name)))
    # From here on torch reads it to skip groups of ranks 1 and 2 where gloo is short of ranks.
    os.environ["BACKEND"] = "mpi" if size > 2 else "gloo"
    with (folder / f"{rank}.jsonl").open("a") as log:

        def write(name: str, state: str, why: str = "") -> None:
            print(json.dumps({"test": name, "state": state, "why": why}), file=log, flush=True)

        for name in unittest.TestLoader().getTestCaseNames(suites["mpi"]):
            suite, why = suites["mpi"], reason_withheld(getattr(suites["mpi"], name))
            if why:
                suite, why = suites["gloo"], reason_withheld(getattr(suites["gloo"], name))
            why = EXCLUDED.get(name, why)
            if why:
                write(name, "excluded" if name in EXCLUDED else "skip", why)
                continue
            write(name, "begin")
            faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True)
            state, why = run_one(suite, name, rank)
            write(name, state, why)
            states = MPI.COMM_WORLD.allgather(state)
            faulthandler.cancel_dump_traceback_later()
            if "fail" in states:
                return False
    return True


def run_one(suite: type[unittest.TestCase], name: str, rank: int) -> tuple[str, str]:
    dist.init_process_group(mpi.BACKEND, timeout=GROUP_TIMEOUT)
    case: Any = suite(name)
    case.rank = rank
    torch.manual_seed(0)
    state, why = outcome(case, name)
    if state != "fail" and dist.is_initialized():
        MPI.COMM_WORLD.Barrier()
        dist.destroy_process_group()
    return state, why


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    shared = Path(sys.argv[1])
    if MPI.COMM_WORLD.rank == 0:
        for part in ("barrier", "test_dir", "init_dir"):
            (shared / part).mkdir(exist_ok=True)
    MPI.COMM_WORLD.Barrier()
    if not run(shared):
        MPI.COMM_WORLD.Barrier()  # every rank has written what it saw
        os._exit(1)
