"""The page on Slurm: its scripts name what exists and, where there is a Slurm, do what it says."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_from_scratch.training.cli import parse
from tests.support.failing_run import LIMIT_S
from tests.support.ranks import ROOT

PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
SCRIPTS = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)


def test_both_scripts_give_options_that_run_py_has():
    assert len(SCRIPTS) == 2
    for script in SCRIPTS:
        (arguments,) = re.findall(r"^(?:exec )?srun python run\.py (.*)$", script, re.MULTILINE)
        settings, options = parse(arguments.split(), "")
        assert (settings.resume, settings.checkpoint_dir) == ("auto", Path("runs/digits"))
        assert options.nproc is None, "srun starts the ranks"


def a_slurm_that_runs() -> bool:
    if shutil.which("sbatch") is None:
        return False
    try:
        idle = subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=5, text=True)
    except subprocess.TimeoutExpired:  # installed, and nobody answers
        return False
    return idle.returncode == 0 and "idle" in idle.stdout


def state_of(job: str) -> str:
    told = subprocess.run(
        ["scontrol", "show", "job", job], capture_output=True, timeout=20, text=True, check=True
    )
    (state,) = re.findall(r"JobState=(\w+)", told.stdout)
    (code,) = re.findall(r"ExitCode=(\d+:\d+)", told.stdout)
    return f"{state} {code}"


def wait_for(what, *arguments):
    end = time.monotonic() + LIMIT_S
    while not (found := what(*arguments)):
        assert time.monotonic() < end, arguments
        time.sleep(0.1)
    return found


@pytest.mark.skipif(not a_slurm_that_runs(), reason="no Slurm with an idle node here")
@pytest.mark.timeout(180)
def test_the_job_saves_when_it_is_told_to_and_goes_on(tmp_path):
    script = tmp_path / "job.sh"
    text = SCRIPTS[0].replace("python run.py", f"{sys.executable} {ROOT / 'run.py'}")
    script.write_text(text.replace("--resume", "--epochs 100000 --resume"))
    step = 0
    for signal, code in (("USR1", 138), ("HUP", 129)):
        job = subprocess.run(
            ["sbatch", "--parsable", script.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
        output = tmp_path / f"digits-{job}.out"
        try:
            wait_for(lambda: output.exists() and "epoch " in output.read_text())  # noqa: B023
            subprocess.run(["scancel", f"--signal={signal}", job], timeout=20, check=True)
            wait_for(lambda: state_of(job).startswith("FAILED"))  # noqa: B023
        finally:
            subprocess.run(["scancel", "--quiet", job], timeout=20)
        assert state_of(job) == f"FAILED {code}:0"
        told = output.read_text()
        (saved,) = re.findall(r"stopped in epoch .*; saved runs/digits/checkpoint-(\d+)\.pt", told)
        assert int(saved) > step, told
        step = int(saved)
        assert ("resuming from" in told) == (signal == "HUP"), told
