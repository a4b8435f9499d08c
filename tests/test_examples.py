"""The programs of `examples/` run on gloo and on mpi, and their ranks agree."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.ranks import MPIRUN, ROOT

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples"
OWN = {
    "gpt.py": ["--steps", "30", "--write", "20"],
    "resnet.py": ["--images", "128", "--epochs", "1"],
    "gan.py": ["--steps", "50"],
}
OTHERS = {
    "lightning_mpi.py": ("lightning", ["--epochs", "2"]),
    "accelerate_mpi.py": ("accelerate", ["--epochs", "2"]),
    "trainer_mpi.py": ("transformers", ["--steps", "20"]),
}


def test_the_table_lists_every_program():
    listed = re.findall(r"^\| \[(.*?)\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    there = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert {*listed, "README.md"} == there
    assert {*OWN, *OTHERS} == {name for name in listed if name.endswith(".py")}


@pytest.mark.parametrize(
    ("program", "more"),
    [
        *((program, []) for program in OWN),
        *(("gpt.py", ["--optimizer", n]) for n in ["sgd", "muon"]),
    ],
)
def test_on_gloo(program, more, tmp_path):
    printed = forked.run([str(FOLDER / program), *OWN[program], *more], 2, tmp_path)
    assert re.search(r"parameters .* on 2 ranks", printed)


@pytest.mark.parametrize("program", OTHERS)
def test_on_mpi(program):
    package, options = OTHERS[program]
    pytest.importorskip(package)
    done = subprocess.run(
        ["mpirun", "-n", "2", sys.executable, FOLDER / program, *options],
        env=os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"parameters .* on 2 ranks|loss \d\.\d+ on 2 ranks, backend mpi", done.stdout)


def test_the_notebook_runs_and_may_run_again(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel shows no output of its children
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("cloudpickle")
    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    (starts,) = (cell for cell in notebook.cells if "start_ranks(train" in cell.source)
    notebook.cells.append(nbformat.from_dict(starts))
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(path))
    client = nbclient.NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    cells = [cell for cell in notebook.cells if "start_ranks(train" in cell.source]
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    sums = [re.findall(r"rank \d: parameters (\w+)", text) for text in printed]
    assert [(len(of_ranks), len(set(of_ranks))) for of_ranks in sums] == [(2, 1)] * 2
