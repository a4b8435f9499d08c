"""What an installed package offers: extras, a script, a backend; every program runs as a path."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddp_from_scratch.errors import UsageError, needs_extra
from tests.support.ranks import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TUTORIAL = [
    path
    for path in sorted((ROOT / "tutorial").glob("[0-9]*/*.py"))
    if path.name not in ("exercise.py", "solution.py", "test_exercise.py")
]
PROGRAMS = [ROOT / "run.py", *TUTORIAL, *sorted((ROOT / "examples").glob("*.py"))]
NEEDS = {
    "accelerate_mpi.py": "accelerate",
    "lightning_mpi.py": "lightning",
    "resnet.py": "torchvision",
    "trainer_mpi.py": "transformers",
}


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


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_as_a_path_from_any_folder(program, tmp_path):
    pytest.importorskip(NEEDS.get(program.name, "torch"))
    done = python(program, "--help", folder=tmp_path)
    assert (done.returncode, done.stdout[:7]) == (0, "usage: "), done.stderr


def test_a_program_trains_as_a_path_from_another_folder(tmp_path):
    done = python(ROOT / "tutorial" / "04_naive" / "naive.py", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# Extras -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tqdm", "torchvision"])
def test_what_is_missing_is_one_line(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    options = ["--model", "resnet18", "--epochs", "1"]
    done = python(ROOT / "run.py", *options, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr == f'error: No module named {name}: pip install "ddp_from_scratch[train]"\n'


def test_the_digits_need_no_torchvision(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = python(ROOT / "run.py", "--epochs", "1", "--quiet", folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_mpi_is_no_entry_point():
    """Loading it would start MPI in any program that names the backend."""
    assert set(PROJECT["project"]["entry-points"]["torch.distributed.backends"]) == {"node"}


# The package's page -----------------------------------------------------------------------------


def test_the_packages_page_shows_the_readmes_example_and_links_nowhere_relative():
    page = (ROOT / PROJECT["project"]["readme"]).read_text()
    (example,) = re.findall(r"```python\n.*?```", page, re.DOTALL)
    assert example in (ROOT / "README.md").read_text()
    assert not re.findall(r"\]\((?!https://)", page)
