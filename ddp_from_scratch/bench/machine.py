"""Description of the machine; absolute times mean nothing without it."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ddp_from_scratch import gpu


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPU, versions, and the commit that was measured."""
    return {
        "processor": _processor(),
        # Those that this process may use, not those that the machine has.
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": gpu.product_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "torchvision": _version("torchvision"),
        "numpy": _version("numpy"),
        "mpi4py": _version("mpi4py"),
        "mpi": _mpi_library(),
        # A number without its commit cannot be measured again.
        "commit": _commit(),
        "uncommitted_changes": uncommitted_changes(),
    }


def uncommitted_changes() -> bool | None:
    """True where tracked files differ from the commit; result files do not count.

    None where there is no repository.
    """
    # Without the results, which a run before this one may have changed.
    others = (":/", ":(top,exclude)benchmarks/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *others)
    return None if changed is None else bool(changed)


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")), None)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _mpi_library() -> str | None:
    """The MPI that this process runs on; importing mpi4py would start one."""
    mpi = sys.modules.get("mpi4py.MPI")
    return None if mpi is None else mpi.Get_library_version().partition("\0")[0].splitlines()[0]


def _commit() -> str | None:
    # An installed package may lie in a folder of another repository.
    tracked = _git("ls-files", "--error-unmatch", __file__) is not None
    return _git("rev-parse", "--short", "HEAD") if tracked else None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
