"""The program starts quickly: what it does not need is not imported."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ddp_from_scratch
from tests.support.failing_run import MACHINE, ROOT, Run

HEAVY = ["torch", "torch._dynamo", "torchvision", "tensorboard"]

# Runs run.py's command line, and at the end prints what it has imported.
TELL = f"""
import os, sys
from ddp_from_scratch.training.main import main
try:
    code = main([__file__], sys.argv[1:])
except (SystemExit, ValueError) as error:
    code = error
found = [name for name in {HEAVY} if name in sys.modules]
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "none"))
# In one write, whatever the buffering: other ranks print, too.
print(" ".join(["rank", rank, "ends with", str(code), "and", *found]) + "\\n", end="", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "tell.py"
    file.write_text(TELL)
    return str(file)


def told(*command: str) -> list[str]:
    """The lines that `TELL` has printed, in order of rank."""
    with Run(*command) as run:
        run.wait()
        return sorted(re.findall(r"^rank .*$", run.out, re.MULTILINE))


def test_help_and_mistakes_need_no_torch(program: str) -> None:
    assert told(sys.executable, program, "--help") == ["rank none ends with 0 and"]
    (line,) = told(sys.executable, program, "--lr", "-1")
    assert line.endswith("--lr must be a positive number, at most 1e+30, got -1.0 and")


def test_the_parent_of_ranks_needs_no_torch_and_ranks_only_that(program: str) -> None:
    assert told(sys.executable, program, "--epochs", "1") == [
        "rank 0 ends with 0 and torch",
        "rank 1 ends with 0 and torch",
        "rank none ends with 0 and",
    ]


@pytest.mark.slow
def test_tensorboard_is_imported_by_the_rank_that_writes(program: str, tmp_path: Path) -> None:
    options = ["--epochs", "1", "--backend", "mpi", "--log-dir", str(tmp_path / "logs")]
    first, second = told("mpirun", "-n", "2", sys.executable, program, *options)
    assert first.endswith(" tensorboard")
    assert second == "rank 1 ends with 0 and torch"


def test_the_package_is_the_same_program() -> None:
    python = [sys.executable, "-m", "ddp_from_scratch"]
    shown = subprocess.run(
        [*python, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert shown.startswith("usage: python -m ddp_from_scratch ")
    assert "mpirun -n 4 python -m ddp_from_scratch --backend mpi" in shown
    assert "run.py" not in shown
    with Run(*python, "--epochs", "1", "--quiet") as run:
        assert run.wait() == 0, run.text
        assert re.fullmatch(r"digits test accuracy 0\.\d{4}\n", run.out)
        assert run.err == ""


def test_the_version_is_in_one_place() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert project["project"]["dynamic"] == ["version"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "ddp_from_scratch.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", ddp_from_scratch.__version__)


def test_public_names_are_imported_when_asked_for() -> None:
    program = """
import sys
import ddp_from_scratch as ddp
assert set(ddp.__all__) <= set(dir(ddp))
assert "torch" not in sys.modules
for name in ddp.__all__:
    assert getattr(ddp, name) is getattr(ddp, name)
    assert ddp.__dict__[name] is getattr(ddp, name)
try:
    ddp.no_such_name
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | MACHINE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "module 'ddp_from_scratch' has no attribute 'no_such_name'\n"
