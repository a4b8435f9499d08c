"""The file of results, with a description of the machine: times mean nothing without it."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ddp_from_scratch import gpu


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPU, versions, and the commit that was measured."""
    # The MPI that this process runs on; importing mpi4py would start one.
    mpi = sys.modules.get("mpi4py.MPI")
    # An installed package may lie in a folder of another repository.
    tracked = _git("ls-files", "--error-unmatch", __file__) is not None
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
        "mpi": mpi and mpi.Get_library_version().partition("\0")[0].splitlines()[0],
        # A number without its commit cannot be measured again.
        "commit": _git("rev-parse", "--short", "HEAD") if tracked else None,
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


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write(
    name: str, title: str, samples: Any, *, settings: Mapping[str, Any], folder: Path
) -> None:
    """Writes every sample, and the machine, to a JSON file: a list of numbers is one line of it.

    `benchmarks.compare` compares files with equal settings. Its samples are a list of dicts with
    `name` and `milliseconds`, the contenders' samples of the same rounds.
    """
    save(name, content_of(title, samples, settings), folder)


def content_of(title: str, samples: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file; see `write`."""
    # Every sample and not the medians alone: `benchmarks.compare` takes ratios round by round.
    return {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "machine": describe(),
        "samples": samples,
    }


def save(name: str, content: Mapping[str, Any], folder: Path) -> None:
    """Writes a content into a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(compact_json(content) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)


def compact_json(value: Any, indent: str = "") -> str:
    """JSON with a line for each key, and a list of numbers on one line; floats of 6 digits."""
    inner = indent + " "
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(str(k))}: {compact_json(v, inner)}" for k, v in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
        entries = [compact_json(entry, inner) for entry in value]
        opening, closing = "[]"
    else:
        return json.dumps(_rounded(value))
    separator = f",\n{inner}"
    return f"{opening}\n{inner}{separator.join(entries)}\n{indent}{closing}"


def _rounded(value: Any) -> Any:
    # 6 digits of a time are far below the noise of any measurement, and a third of the file.
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def on_terminal() -> bool:
    """True where standard error is a terminal; under mpirun only once the group is open."""
    return sys.stderr.isatty()
