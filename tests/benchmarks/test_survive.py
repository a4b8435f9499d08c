"""benchmarks/survive.py: its drill, what it compares, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import survive
from benchmarks.survive import Run, differences, table
from tests.support.ranks import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.survive", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_ranks_that_are_killed_cost_no_bit(tmp_path: Path) -> None:
    options = ["--kills", "5", "--epochs", "60", "--no-torchrun"]
    done = run(*options, "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills: all " in done.stdout
    (file,) = tmp_path.glob("survive*.json")
    assert str(tmp_path) not in file.read_text()
    rows = {row["name"]: row["median"] for row in json.loads(file.read_text())["samples"]}
    assert {"noticed", "group", "step", "together", "joined", "a kill"} <= rows.keys()


def test_a_count_of_kills_is_checked() -> None:
    done = run("--kills", "0")
    assert done.returncode == 2
    assert "--nproc, --kills and --epochs must be 1 or more" in done.stderr
    done = run("--every", "0")
    assert done.returncode == 2
    assert "--every must be more than 0 seconds, got 0" in done.stderr


def test_states_differ_in_one_bit_or_a_missing_tensor() -> None:
    state = {"model": {"weight": torch.zeros(3)}, "steps": [torch.ones(())]}
    other = {"model": {"weight": torch.tensor([0.0, 0.0, -0.0])}, "steps": []}
    assert differences(state, state) == []
    assert differences(state, other) == ["/model/weight", "/steps/0"]


def test_each_kill_is_paired_with_what_followed_it() -> None:
    killed = Run(
        kills=[10.0, 20.0, 21.0],
        regroupings=[(10.2, 3, 50.0, 60.0), (10.9, 4, 40.0, 30.0), (21.5, 2, 100.0, 100.0)],
        seconds=33.0,
    )
    rows = {name: values for name, *values in table(killed, Run(seconds=30.0), 4)}
    assert {name: [value and round(value) for value in row] for name, row in rows.items()} == {
        "noticed": [195, 300],
        "group": [75, 100],
        "step": [80, 100],
        "together": [350, 500],
        "joined": [900, 900],
        "a kill": [1000, None],
    }


def test_ranks_of_a_process_that_has_ended_are_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert list(survive._ranks(process.pid)) == []
