"""PyTorch's own distributed tests, from the installed wheel, pass on the mpi backend."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.ranks import MPIRUN

RUNNER = Path(__file__).parents[1] / "support" / "torch_suite.py"
RANKS = 4  # for which most of them are made
AT_LEAST = 115  # so that a torch which skips everything is noticed; 132 with torch 2.15

# torch's reasons to skip a test that have nothing to do with this backend.
REASONS = re.compile(
    r"accelerator|GPU|CUDA|cuda|N(CCL|ccl)|nccl|world size|fail(ing|s)|flak"
    r"|github.com/pytorch/pytorch/issues"
)


def read(folder):
    found = {}
    for rank in range(RANKS):
        lines = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        for name, last in {line["test"]: line for line in lines}.items():
            found.setdefault(name, []).append(last)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.__version__ < "2.14", reason='torch takes no backend by the name "mpi"')
@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs expecttest")
def test_torchs_own_tests(tmp_path):
    result = subprocess.run(
        ["mpirun", "-n", str(RANKS), sys.executable, str(RUNNER), str(tmp_path)],
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
    )
    found = read(tmp_path)
    for name, lines in found.items():
        told = [f"rank {rank}: {line['state']} {line['why']}" for rank, line in enumerate(lines)]
        good = all(line["state"] in ("pass", "skip", "excluded") for line in lines)
        assert good, f"{name}\n{chr(10).join(told)}\n{result.stderr[-10000:]}"
    assert result.returncode == 0, result.stderr[-10000:]
    assert all(len(lines) == RANKS for lines in found.values())
    for name, lines in found.items():
        for line in lines:
            assert line["state"] != "skip" or REASONS.search(line["why"]), (name, line["why"])
    counts = Counter("pass" for lines in found.values() if lines[0]["state"] == "pass")
    assert counts["pass"] >= AT_LEAST, counts
