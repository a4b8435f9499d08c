"""Result files, with a description of the machine, without which times mean nothing."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ddp_from_scratch import gpu


def describe() -> dict[str, Any]:
    """Returns the processor, cores, memory, GPU, versions, and the measured commit."""
    # Not an import of mpi4py, which would start MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    # An installed package may lie inside another repository.
    tracked = _git("ls-files", "--error-unmatch", __file__) is not None
    but_results = (":/", ":(top,exclude)benchmarks/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *but_results)
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),  # that this process may use
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": gpu.product_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mpi": mpi and mpi.Get_library_version().partition("\0")[0].splitlines()[0],
        "commit": _git("rev-parse", "--short", "HEAD") if tracked else None,
        "uncommitted_changes": None if changed is None else bool(changed),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def content_of(title: str, samples: Any, **settings: Any) -> dict[str, Any]:
    """Returns what `benchmarks.compare` compares: all samples, the settings, and the machine."""
    return {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "machine": describe(),
        "samples": samples,
    }


def save(name: str, content: Mapping[str, Any], folder: Path) -> None:
    """Writes `content` to a file in a folder, which is made if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(compact_json(content) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)


def compact_json(content: Mapping[str, Any]) -> str:
    """Returns JSON with a line per key, a list of numbers on one line, and floats of 6 digits."""
    text = json.dumps(_rounded(content), indent=1)
    return re.sub(r"\[([^][{}]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def _rounded(value: Any) -> Any:
    # The other digits of a time are noise, and would triple the file.
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
