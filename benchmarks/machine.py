"""What a measurement was taken on; absolute times mean nothing without it."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Processor, cores, GPU, versions, and the commit that was measured."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else None
