"""Runs of `run.py --go-on` with a fault in each rank, and what their last checkpoint holds."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import ROOT

# As run.py, but for a part of the trainer that is replaced first, on each rank.
PROGRAM = """
import os, signal, sys
from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.main import main

me = os.environ.get("DDP_MEMBER")
if me is not None:
    from ddp_from_scratch.training.loop import Trainer

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(name, fault, owner=Trainer):
        method = getattr(owner, name)
        def replacement(*args, **options):
            fault(args[0])
            return method(*args, **options)
        setattr(owner, name, replacement)

    {fault}
run_to_exit(lambda: main([sys.argv[0]], sys.argv[1:]))
"""

STEPS_PER_EPOCH = 5  # of 256 digits


def start(
    tmp_path: Path, fault: str, *options: str, nproc: int | str = 3, on: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a run; `on` is what comes before the command."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(fault=fault.strip().replace("\n", "\n    ")))
    command = [*on, sys.executable, str(program), "--nproc", str(nproc), "--shards", "8"]
    command += ["--checkpoint-dir", str(tmp_path / "checkpoints"), *options]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            pytest.fail(f"it did not end: {out}{err}")
    assert process.returncode == code, out + err
    return out, err


def tensors(state: Any, name: str = "") -> dict[str, bytes]:
    if isinstance(state, torch.Tensor):
        return {name: state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found = {}
    for key, value in items:
        if isinstance(value, dict | list | tuple | torch.Tensor):
            found |= tensors(value, f"{name}/{key}")
    return found


def last(tmp_path: Path) -> dict[str, bytes]:
    newest = max((tmp_path / "checkpoints").glob("checkpoint-*.pt"))
    return tensors(torch.load(newest, weights_only=True))
