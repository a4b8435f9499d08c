"""benchmarks/start_time.py: every command runs, and the table holds its multiple."""

import json
import subprocess
import sys

import pytest

from benchmarks import start_time
from ddp_from_scratch.bench.samples import Samples
from tests.support.ranks import ROOT


def test_a_table_by_hand():
    measured = [
        Samples(start_time.REFERENCE, [1000.0, 2000.0, 1000.0]),
        Samples("run.py, 2 ranks", [1500.0, 3000.0, 1500.0]),
    ]
    lines = start_time.table(measured).splitlines()
    assert lines[-1].split() == ["run.py,", "2", "ranks", "1.50", "1.50", "1.50", "to", "1.50"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_round(tmp_path):
    command = ["-m", "benchmarks.start_time", "--ranks", "2", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, *command, "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    names = [samples["name"] for samples in json.loads(file.read_text())["samples"]]
    assert names == list(start_time.commands([2]))
    assert all(name in done.stdout for name in names)
