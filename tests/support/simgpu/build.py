"""Builds the device guard, once for each torch, Python and text."""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch


def missing() -> str:
    if torch.__version__ < "2.14":
        return "the simulated GPU takes NCCL's place from torch 2.14 on"
    return "" if shutil.which("g++") else "no C++ compiler for the simulated GPU"


@cache
def guard() -> ModuleType:
    """The extension, from the cache if it has been built before."""
    source = Path(__file__).with_name("guard.cpp")
    text = source.read_bytes() + f"{torch.__version__} {sys.implementation.cache_tag}".encode()
    name = f"simgpu_{hashlib.sha256(text).hexdigest()[:16]}"
    library = Path(tempfile.gettempdir()) / f"{name}.so"
    if not library.exists():
        _build(name, source, library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(name: str, source: Path, library: Path) -> None:
    """Others may build the same: the file is there when it is whole."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        options = {"extra_cflags": ["-O0"], "with_cuda": False}
        cpp_extension.load(name, [str(source)], build_directory=folder, **options)
        os.replace(Path(folder) / library.name, library)


if __name__ == "__main__":
    guard()
