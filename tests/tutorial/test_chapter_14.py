"""The program of chapter 14 finds its place under each launcher, as its page says."""

import os
import re
import runpy
import socket
import subprocess
import sys

import pytest

from tests.support.ranks import MPIRUN, ROOT
from tests.tutorial.chapters import TUTORIAL
from tests.tutorial.test_programs import form

CHAPTER = TUTORIAL / "14_under_mpi"
PAGE = (CHAPTER / "README.md").read_text()
SLURM = (CHAPTER / "under_slurm.md").read_text()
PROGRAM = runpy.run_path(str(CHAPTER / "under_mpi.py"))
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}


def commands():
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    # Whatever PATH says: the Python of this test.
    of = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    return {
        line.split()[0]: [part for word in line.split() for part in of.get(word, [word])]
        for line in block.splitlines()
    }


def shown():
    return PAGE.split("The first of them prints\n\n```text\n")[1].split("```")[0]


def start(command, folder, **environment):
    return subprocess.Popen(
        [*command, "--picture", str(folder / "under_mpi.png")],
        cwd=ROOT,
        env=os.environ | MPIRUN | {"PYTHONPATH": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def taken_port():
    with socket.create_server(("localhost", 0)) as taken:
        yield str(taken.getsockname()[1])


@pytest.fixture
def free_port():
    with socket.create_server(("localhost", 0)) as probe:
        return str(probe.getsockname()[1])


def check(launcher, processes, folder):
    """All end well; the output is what the page shows for mpirun."""
    printed = ""
    for process in processes:
        output, errors = process.communicate(timeout=80)
        assert process.returncode == 0, errors
        printed += output
    expected = shown().replace("mpirun", launcher)
    expected = expected.replace("tutorial-pictures", str(folder))
    assert form(printed) == form(expected)
    assert (folder / "under_mpi.png").stat().st_size > 1000


def test_under_mpirun(tmp_path):
    check("mpirun", [start(commands()["mpirun"], tmp_path)], tmp_path)


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    check("torchrun", [start(commands()["torchrun"], tmp_path)], tmp_path)


@pytest.mark.slow
def test_with_the_variables_of_srun(tmp_path, free_port):
    _, _, _, *command = commands()["srun"]
    tasks = [
        start(command, tmp_path, MASTER_PORT=free_port, **place)
        for place in (SRUN | {"SLURM_PROCID": n, "SLURM_LOCALID": n} for n in "01")
    ]
    check("srun", tasks, tmp_path)


def test_one_line_where_the_port_is_taken(tmp_path, taken_port):
    _, _, _, *command = commands()["srun"]
    place = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_PORT": taken_port}
    _, errors = start(command, tmp_path, **place).communicate(timeout=60)
    assert errors.splitlines()[-1] == (
        f"rank 0: cannot use port {taken_port} of localhost; set MASTER_PORT to another"
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, ("no launcher", 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 3, 4, 1)),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1"} | SRUN, ("srun", 1, 2, 1)),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": "5"}
            | {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
            | SRUN,
            ("mpirun", 5, 6, 2),
        ),
        ({"SLURM_JOB_ID": "1"}, ("no launcher", 0, 1, 0)),
    ],
)
def test_find_place(names, expected):
    assert PROGRAM["find_place"](names) == expected


def test_the_pages_name_the_variables_that_are_read():
    for launcher, names in PROGRAM["VARIABLES"].items():
        assert launcher in PAGE
        for name in names:
            assert f"`{name}`" in PAGE, name
    for name in PROGRAM["VARIABLES"]["srun"]:
        assert f"`{name}`" in SLURM, name


def test_the_job_is_a_script_that_runs_the_program():
    (script,) = re.findall(r"```bash\n(.*?)```", SLURM, re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)
    assert script.splitlines()[-1] == "srun python -m tutorial.14_under_mpi.under_mpi"
