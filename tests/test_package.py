"""What an installed package offers: extras, a script, a backend; every program runs as a path."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import ddp_from_scratch
from tests.support.ranks import ROOT
from tutorial.chapters import CHAPTERS, programs

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TUTORIAL = [program for chapter in CHAPTERS for program in programs(chapter)]
FOREIGN = {"accelerate_mpi.py", "lightning_mpi.py", "lightning_strategy.py", "ray_train.py"}
FOREIGN |= {"submitit_train.py", "trainer_mpi.py"}
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


@pytest.mark.parametrize("program", [*TUTORIAL, *sorted(EXAMPLES)], ids=lambda path: path.stem)
def test_a_program_runs_as_a_path_from_any_folder(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.slow
def test_the_digits_need_neither_torchvision_nor_matplotlib(tmp_path):
    for name in ("torchvision", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    options = ["--epochs", "1", "--timeline", "timeline"]
    done = python(ROOT / "run.py", *options, folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "timeline.html\nno picture: that takes matplotlib" in done.stdout


@pytest.mark.program
def test_the_launcher_starts_without_torch(tmp_path):
    """The script is the program, and answers at once."""
    module, _, function = PROJECT["project"]["scripts"]["ddp-run"].partition(":")
    code = f"import sys; sys.modules['torch'] = None; from {module} import {function}; {function}()"
    done = python("-c", code, "--lr=-1", folder=tmp_path)
    told = "error: --lr must be a positive number, at most 1e+30, got -1.0\n"
    assert (done.returncode, done.stderr) == (2, told)


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"], (_, module, *sys.argv[1:]) = None, sys.argv
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


NEED_NO_TORCH = ["ddp_from_scratch", "run", "tutorial", "tutorial.samples"]
NEED_NO_TORCH += ["ddp_from_scratch.bench", "benchmarks.start_time"]


@pytest.mark.program
@pytest.mark.parametrize("module", NEED_NO_TORCH)
def test_help_needs_no_torch(module, tmp_path):
    done = python("-c", WITHOUT_TORCH, module, "--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m {module}" in done.stdout or "usage: run.py" in done.stdout


@pytest.mark.slow
def test_what_is_missing_is_one_line(tmp_path):
    missing = "No module named torchvision"
    (tmp_path / "torchvision.py").write_text(f"raise ModuleNotFoundError('{missing}')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = python(ROOT / "run.py", "--model", "resnet18", folder=tmp_path, PYTHONPATH=path)
    told = f'error: {missing}: pip install "ddp_from_scratch[train]"\n'
    assert (done.returncode, done.stderr) == (2, told)


WITHOUT_AN_IMPORT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("node", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
assert "ddp_from_scratch.node" in sys.modules and "mpi4py" not in sys.modules
"""


@pytest.mark.slow
def test_torch_finds_the_node_backend_without_an_import(tmp_path):
    """From a folder that says, as an installation does, what the package's entry points are."""
    if not hasattr(torch.distributed.Backend, "_ensure_backend_registered"):
        pytest.skip("torch 2.14 and later look for backends among entry points")
    info = tmp_path / "ddp_from_scratch-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: ddp_from_scratch\nVersion: 0\n")
    ((group, points),) = PROJECT["project"]["entry-points"].items()
    assert points.keys() == {"node"}  # loading mpi would start MPI
    (info / "entry_points.txt").write_text(f"[{group}]\nnode = {points['node']}")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = python("-c", WITHOUT_AN_IMPORT, folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_same_everywhere():
    version = re.escape(ddp_from_scratch.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2]
    assert re.match(rf"{version}, (unreleased|\d{{4}}-\d\d-\d\d)\n", newest)


def test_the_workflow_runs_every_session_of_nox():
    sessions = (ROOT / "noxfile.py").read_text()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    versions = ast.literal_eval(re.search(r"^TORCH = (.*)$", sessions, re.MULTILINE)[1])
    pythons = ast.literal_eval(re.search(r"python=(\[.*\])", sessions)[1])
    libraries = ast.literal_eval(re.search(r"^MPI = (\[.*\])", sessions, re.MULTILINE)[1])
    names = [*(f"tests(torch='{v}')" for v in versions), *(f"newest-{p}" for p in pythons)]
    names += [f"mpi(library='{library}')" for library in libraries]
    assert re.findall(r"^ {10}- (\S+)$", workflow, re.MULTILINE) == names
    (other,) = re.findall(r"SESSIONS=(\w+)", workflow)
    assert f"def {other}(" in sessions


def test_the_readme_names_the_versions_that_the_package_declares():
    sessions = (ROOT / "noxfile.py").read_text()
    torches = ast.literal_eval(re.search(r"^TORCH = (.*)$", sessions, re.MULTILINE)[1])
    classifiers = "\n".join(PROJECT["project"]["classifiers"])
    pythons = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    named = f"torch {torches[0]} to {torches[-1]} and Python {pythons[0]} to {pythons[-1]},"
    assert named in " ".join((ROOT / "README.md").read_text().split())
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert f"torch>={torches[0]}" in PROJECT["project"]["dependencies"]


def test_the_packages_page_shows_the_readmes_example_and_links_nowhere_relative():
    page = (ROOT / PROJECT["project"]["readme"]).read_text()
    (example,) = re.findall(r"```python\n.*?```", page, re.DOTALL)
    assert example in (ROOT / "README.md").read_text()
    assert not re.findall(r"\]\((?!https://)", page)
