"""What a run of the tests of the GPU has shown, to send back."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FILE = Path("gpu-report.txt")


def names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def lines(stats: Mapping[str, Sequence[Any]], gpus: Sequence[str]) -> list[str]:
    if not gpus:
        return ["nothing is shown about nccl: this machine has no GPU"]
    passed, failed = stats.get("passed", []), [*stats.get("failed", []), *stats.get("error", [])]
    bare = "one rank a GPU" if len(gpus) > 1 else "two ranks shared it: no NVLink was tried"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    chosen = os.environ.get("TORCH_DIST_USE_NCCL2", "not set")
    return [
        f"nccl: {len(passed)} tests passed and {len(failed)} failed on {len(gpus)} x {gpus[0]} "
        f"({bare}), torch {torch.__version__}, NCCL {nccl}, TORCH_DIST_USE_NCCL2 {chosen}",
        *(f"failed {report.nodeid}\n{report.longreprtext}" for report in failed),
        *(f"passed {report.nodeid}" for report in passed),
    ]
