"""Where ranks meet: privately on one machine, by the same name on several."""

import os
import stat
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import UsageError, World
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.environment import ALONE, Placement
from ddp_from_scratch.world import world as rendezvous
from tests.support.ranks import listening
from tests.support.refusal import refusal
from tests.support.tiers import slow

LIMIT = timedelta(seconds=5)
ONE_MACHINE = Placement(0, 2, 0, 2, 0, "torchrun")
SEVERAL = Placement(0, 2, 0, 1, 0, "torchrun")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    **{"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_NODEID": "0"},
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
}
VARIABLES = (
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("RANK", "WORLD_SIZE", "DDP_RENDEZVOUS_FILE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


@pytest.fixture
def environ(environment, monkeypatch, tmp_path):
    """Sets variables, and removes them after the test, with those that rendezvous sets."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda **variables: os.environ.update(variables)


def listening_sockets(world: World) -> list[str]:
    """The addresses at which this process listens, as hexadecimal, after a collective."""
    dist.all_reduce(torch.ones(1))
    links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
    mine = {os.readlink(link) for link in links if link.is_symlink()}
    return [address for address, _, inode in listening() if f"socket:[{inode}]" in mine]


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_one_machine_opens_no_port_to_others(backend, ranks):
    loopback = {"0100007F", "00000000000000000000000001000000"}
    # New ranks: what other tests have run may listen, too.
    for addresses in ranks(backend, 2, fresh=True)(listening_sockets):
        assert set(addresses) <= loopback
        assert addresses or backend == "mpi"  # gloo does listen: this test can see it


def test_stores_of_one_machine(environ, tmp_path):
    placement, store = rendezvous.meet(LIMIT)
    assert placement == ALONE
    assert isinstance(store, dist.HashStore)
    environ(**TORCHRUN, DDP_RENDEZVOUS_FILE=str(tmp_path / "file"))  # of start_ranks
    placement, store = rendezvous.meet(LIMIT)
    assert placement == ONE_MACHINE
    assert isinstance(store, dist.FileStore)
    assert store.path == str(tmp_path / "file")


def test_torchrun_brings_its_own_store(environ):
    environ(**TORCHRUN)
    assert "MASTER_PORT=None, expected a number" in refusal(rendezvous.meet, LIMIT)
    environ(MASTER_PORT="29500")
    assert "MASTER_ADDR is not set" in refusal(rendezvous.meet, LIMIT)
    environ(MASTER_ADDR="127.0.0.1")

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    environ(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    environ(MASTER_PORT=str(server.port))
    first, second = (rendezvous.meet(LIMIT)[1] for _ in range(2))
    first.set("address", "old")
    assert second.get("address") == b"old"
    # Ranks that it starts again do not see what those before them have left.
    environ(TORCHELASTIC_RESTART_COUNT="1")
    assert not rendezvous.meet(LIMIT)[1].check(["address"])
    # On several machines each counts restarts by itself; start_ranks never starts a rank again.
    environ(LOCAL_WORLD_SIZE="1")
    assert rendezvous.meet(LIMIT) == (SEVERAL, None)
    environ(DDP_MACHINE_0="192.0.2.1")
    rendezvous.meet(LIMIT)[1].set("address", "new")


def test_srun_on_one_machine_meets_in_a_private_file(environ, tmp_path):
    environ(**SRUN, SLURM_SRUN_COMM_PORT="40001")
    placement, store = rendezvous.meet(LIMIT)
    assert placement == Placement(1, 2, 1, 2, 0, "srun")
    assert isinstance(store, dist.FileStore)
    folder = tmp_path / f"ddp-{os.getuid()}"
    assert store.path == str(folder / "slurm-12-3-0-40001")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for mode in (0o720, 0o755):  # somebody else could have put a file there, or read one
        folder.chmod(mode)
        with pytest.raises(UsageError, match=r"is a link, belongs .* or set TMPDIR to a f"):
            rendezvous.meet(LIMIT)
    folder.chmod(0o700)
    tmp_path.chmod(0o777)  # and not sticky: anybody could put another one in its place
    assert "or the folder around it is open to others" in refusal(rendezvous.meet, LIMIT)
    tmp_path.chmod(0o700)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert f"{folder} is a link" in refusal(rendezvous.meet, LIMIT)
    folder.unlink()
    rendezvous.meet(LIMIT)
    if os.getuid() == 0:
        os.chown(folder, 1, 1)
        assert "belongs to somebody else" in refusal(rendezvous.meet, LIMIT)


def test_srun_on_several_machines_meets_on_the_first(environ, monkeypatch):
    monkeypatch.setattr(rendezvous, "_store_of_rank_0", lambda placement, timeout: placement.rank)
    environ(**SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]"})
    placement, store = rendezvous.meet(LIMIT)
    assert (placement.one_machine, store) == (False, 1)
    assert os.environ["MASTER_ADDR"] == "gpu03"
    assert os.environ["MASTER_PORT"] == str(20000 + 31 * 12 + 3)
    for job in range(0, 2**26, 99_991):  # below the ports that Linux gives to connections
        del os.environ["MASTER_PORT"]
        environ(SLURM_JOB_ID=str(job))
        rendezvous.meet(LIMIT)
        assert 20000 <= int(os.environ["MASTER_PORT"]) < 32768

    environ(MASTER_ADDR="mine", MASTER_PORT="1", SLURM_JOB_ID="twelve")
    assert "SLURM_JOB_ID='twelve'" in refusal(rendezvous.meet, LIMIT)
    environ(SLURM_JOB_ID="12")
    rendezvous.meet(LIMIT)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("mine", "1")


def test_the_interface_is_loopback_or_the_way_to_the_master(environ):
    environment.choose_interface(ONE_MACHINE)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"

    environ(GLOO_SOCKET_IFNAME="ib0")  # what the user has set stays
    environment.choose_interface(ONE_MACHINE)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"

    del os.environ["GLOO_SOCKET_IFNAME"]
    environ(MASTER_ADDR="no.such.host.invalid")
    environment.choose_interface(SEVERAL)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    del os.environ["NCCL_SOCKET_IFNAME"]
    environ(MASTER_ADDR="127.0.0.1")
    environment.choose_interface(SEVERAL)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"  # and no other whose name begins so


def test_a_leftover_of_mpirun_without_mpi4py_says_what_to_install(environ, monkeypatch):
    environ(PMI_SIZE="1", PMI_RANK="0")
    monkeypatch.setattr(rendezvous, "find_spec", lambda name: None)
    told = refusal(rendezvous._open, "gloo", LIMIT)
    assert told.startswith("under mpirun the ranks of gloo meet through mpi4py, which is not inst")


TORCHRUNS = "torchrun started 2 processes but MPI sees 1"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (TORCHRUN, f"{TORCHRUNS}: start it with mpirun"),
        # torchrun as mpirun's only process: each of its own is rank 0 of 1.
        (TORCHRUN | {"PMI_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, TORCHRUNS),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "0"},  # left in an interactive shell
            "mpirun started 4 processes but MPI sees 1: use the mpirun of the MPI that mpi4py "
            "loads, or unset PMI_SIZE and PMI_RANK if no mpirun started this process",
        ),
        (SRUN, "srun started 2 processes but MPI sees 1: add --mpi=pmix"),
        (TORCHRUN | {"PMI_SIZE": "1"}, None),  # mpirun's, and variables that a shell has left
    ],
)
def test_a_group_of_a_launcher_that_mpi_does_not_see(variables, told, environ):
    """It is refused: each process would be a world of one, and silently train on its own."""
    from ddp_from_scratch import mpi

    environ(**variables)
    if told is None:
        dist.init_process_group(mpi.BACKEND, init_method="mpi://")
        assert dist.get_world_size() == 1
        dist.destroy_process_group()
        return
    for backend in {"gloo", mpi.BACKEND}:
        assert told in refusal(dist.init_process_group, backend, init_method="mpi://")
