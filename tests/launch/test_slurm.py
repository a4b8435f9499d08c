"""The page on Slurm: its scripts give options that exist."""

import re
from pathlib import Path

from ddp_from_scratch.training.cli import parse
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
