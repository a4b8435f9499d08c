"""Builds the device guard, once for each torch and text."""

import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch


def missing() -> str:
    """What is missing here for it, or nothing."""
    if torch.__version__ < "2.14":
        return "the simulated GPU takes NCCL's place from torch 2.14 on"
    return "" if shutil.which("g++") else "no C++ compiler for the simulated GPU"


@cache
def guard() -> ModuleType:
    """The extension, from the cache if it has been built before."""
    from torch.utils import cpp_extension

    source = Path(__file__).with_name("guard.cpp")
    text = source.read_bytes() + torch.__version__.encode()
    name = f"simgpu_{hashlib.sha256(text).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    return cpp_extension.load(
        name, [str(source)], build_directory=str(folder), extra_cflags=["-O0"], with_cuda=False
    )


if __name__ == "__main__":
    guard()
