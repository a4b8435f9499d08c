"""What an installed package offers: extras, a script, a backend; every program runs as a path."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddp_from_scratch.errors import UsageError, needs_extra
from tests.support.ranks import ROOT
from tests.support.tiers import slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TUTORIAL = [
    path
    for path in sorted((ROOT / "tutorial").glob("[0-9]*/*.py"))
    if path.name not in ("exercise.py", "solution.py", "test_exercise.py")
]
FOREIGN = {"lightning_mpi.py", "accelerate_mpi.py", "trainer_mpi.py"}
EXAMPLES = [path for path in (ROOT / "examples").glob("*.py") if path.name not in FOREIGN]


def python(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


# Programs ---------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a program in this process and another folder; returns what it prints."""

    def run(program, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        runpy.run_path(str(program), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("program", [*TUTORIAL, *sorted(EXAMPLES)], ids=lambda path: path.stem)
def test_a_program_runs_as_a_path_from_any_folder(program, run, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run(program, "--help")
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_program_starts_ranks_as_a_path_from_another_folder(run):
    assert "\n" in run(ROOT / "tutorial" / "03_all_reduce" / "ring.py")


# Extras -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchvision", slow("tqdm")])
def test_what_is_missing_is_one_line(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    options = ["--model", "resnet18", "--epochs", "1"]
    done = python(ROOT / "run.py", *options, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr == f'error: No module named {name}: pip install "ddp_from_scratch[train]"\n'


@pytest.mark.slow
def test_the_digits_need_neither_torchvision_nor_matplotlib(tmp_path):
    """A timeline says that it has no picture."""
    for name in ("torchvision", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    options = ["--epochs", "1", "--timeline", "timeline"]
    done = python(ROOT / "run.py", *options, folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "timeline.html\nno picture: that takes matplotlib" in done.stdout
    assert [file.name for file in (tmp_path / "timeline").glob("timeline.[hp]*")] == [
        "timeline.html"
    ]


def test_a_torchvision_of_another_torch_is_one_line():
    told = "nms does not exist: torch and torchvision must come"
    with pytest.raises(UsageError, match=told), needs_extra("train"):
        raise RuntimeError("operator torchvision::nms does not exist")


# Entry points -----------------------------------------------------------------------------------

WITHOUT_AN_IMPORT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("node", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
assert "ddp_from_scratch.node" in sys.modules and "mpi4py" not in sys.modules
"""


@pytest.fixture
def installed(tmp_path):
    """A folder that says, as an installation does, what the package's entry points are."""
    info = tmp_path / "ddp_from_scratch-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: ddp_from_scratch\nVersion: 0\n")
    groups = PROJECT["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    assert set(groups["torch.distributed.backends"]) == {"node"}  # loading mpi would start MPI
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def test_torch_finds_the_node_backend_without_an_import(installed):
    from torch.distributed import Backend

    if not hasattr(Backend, "_ensure_backend_registered"):
        pytest.skip("torch 2.14 and later look for backends among entry points")
    path = f"{installed}{os.pathsep}{ROOT}"
    done = python("-c", WITHOUT_AN_IMPORT, folder=installed, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_is_the_program(tmp_path):
    module, _, function = PROJECT["project"]["scripts"]["ddp-run"].partition(":")
    code = f"from {module} import {function}; {function}()"
    done = python("-c", code, "--no-such-option", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


# The package's page -----------------------------------------------------------------------------


def test_the_packages_page_shows_the_readmes_example_and_links_nowhere_relative():
    page = (ROOT / PROJECT["project"]["readme"]).read_text()
    (example,) = re.findall(r"```python\n.*?```", page, re.DOTALL)
    assert example in (ROOT / "README.md").read_text()
    assert not re.findall(r"\]\((?!https://)", page)
