"""Where ranks meet: privately on one machine, by the same name on several."""

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import UsageError, World, start_ranks
from ddp_from_scratch.launch import environment, interfaces, multi_node
from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.launch.gate import StrangerError
from ddp_from_scratch.world import rendezvous
from tests.support.ranks import Crew
from tests.support.tiers import slow

LIMIT = timedelta(seconds=5)
ONE_MACHINE = Placement(0, 2, 0, 2, 0, "torchrun")
SEVERAL = Placement(0, 2, 0, 1, 0, "torchrun")
SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
VARIABLES = (
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("RANK", "WORLD_SIZE", "DDP_RENDEZVOUS_FILE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets variables; those that rendezvous sets by itself are gone again after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored whatever the test does to it
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def listening_sockets(world: World) -> list[str]:
    """The addresses at which this process listens, as hexadecimal, after a collective."""
    dist.all_reduce(torch.ones(1))
    mine = {
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
    }
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in mine and state == "0A":
                found.append(local.partition(":")[0])
    return found


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_one_machine_opens_no_port_to_others(backend: str) -> None:
    loopback = {"0100007F", "00000000000000000000000001000000"}
    # New ranks: what other tests have run may listen, too. So may MPI once it is imported, which is
    # why nothing in this file imports it for the ranks of gloo.
    crew = Crew(backend, 2)
    try:
        found = crew(listening_sockets)
    finally:
        crew.end()
    for addresses in found:
        assert set(addresses) <= loopback
        assert addresses or backend == "mpi"  # gloo does listen: this test can see it


def test_alone_without_a_launcher(environ: Callable[..., None]) -> None:
    placement, store = rendezvous.meet(LIMIT)
    assert placement == environment.ALONE
    assert isinstance(store, dist.HashStore)


def test_torchrun_brings_its_own_store(environ: Callable[..., None]) -> None:
    environ(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    with pytest.raises(UsageError, match="MASTER_PORT=None, expected a number"):
        rendezvous.meet(LIMIT)
    environ(MASTER_PORT="29500")
    with pytest.raises(UsageError, match="MASTER_ADDR is not set"):
        rendezvous.meet(LIMIT)
    environ(MASTER_ADDR="127.0.0.1")
    assert rendezvous.meet(LIMIT) == (ONE_MACHINE, None)


def test_ranks_that_torchrun_starts_again_do_not_see_what_others_left(
    environ: Callable[..., None],
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    environ(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    environ(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port))
    environ(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    first, second = (rendezvous.meet(LIMIT)[1] for _ in range(2))
    assert first is not None
    assert second is not None
    first.set("address", "old")
    assert second.get("address") == b"old"
    environ(TORCHELASTIC_RESTART_COUNT="1")
    again = rendezvous.meet(LIMIT)[1]
    assert again is not None
    assert not again.check(["address"])


def test_start_ranks_on_several_machines_brings_a_store_and_torchrun_none(
    environ: Callable[..., None],
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    environ(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    environ(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port))
    environ(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    assert rendezvous.meet(LIMIT) == (SEVERAL, None)  # each machine counts restarts by itself
    environ(DDP_MACHINE_0="192.0.2.1")
    store = rendezvous.meet(LIMIT)[1]
    assert store is not None
    store.set("address", "new")


def test_start_ranks_brings_a_file(environ: Callable[..., None], tmp_path: Path) -> None:
    environ(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    environ(DDP_RENDEZVOUS_FILE=str(tmp_path / "file"))
    placement, store = rendezvous.meet(LIMIT)
    assert placement == ONE_MACHINE
    assert isinstance(store, dist.FileStore)
    assert store.path == str(tmp_path / "file")


def test_srun_on_one_machine_meets_in_a_private_file(
    environ: Callable[..., None], tmp_path: Path
) -> None:
    environ(**SRUN, SLURM_SRUN_COMM_PORT="40001")
    placement, store = rendezvous.meet(LIMIT)
    assert placement == Placement(1, 2, 1, 2, 0, "srun")
    assert isinstance(store, dist.FileStore)
    folder = tmp_path / f"ddp-{os.getuid()}"
    assert store.path == str(folder / "slurm-12-3-0-40001")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    for mode in (0o720, 0o702, 0o755):  # somebody else could have put a file there, or read one
        folder.chmod(mode)
        with pytest.raises(UsageError, match="open to others: remove it"):
            rendezvous.meet(LIMIT)


def test_somebody_elses_folder_in_that_place_is_refused(
    environ: Callable[..., None], tmp_path: Path
) -> None:
    """Its name is known to all who may write to /tmp."""
    environ(**SRUN)
    place = tmp_path / f"ddp-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)

    place.symlink_to(elsewhere)
    with pytest.raises(UsageError, match=f"{place} is a link, belongs to somebody else, or"):
        rendezvous.meet(LIMIT)
    assert not list(elsewhere.iterdir())
    place.unlink()

    place.write_text("a file")
    with pytest.raises(UsageError, match="remove it, or set TMPDIR to a folder of your own"):
        rendezvous.meet(LIMIT)
    place.unlink()

    tmp_path.chmod(0o777)  # and not sticky: anybody could put another one in its place
    with pytest.raises(UsageError, match="is a link, belongs"):
        rendezvous.meet(LIMIT)
    tmp_path.chmod(0o1777)
    rendezvous.meet(LIMIT)
    tmp_path.chmod(0o700)

    if os.getuid() == 0:
        os.chown(place, 1, 1)
        with pytest.raises(UsageError, match="is a link, belongs"):
            rendezvous.meet(LIMIT)


def test_srun_on_several_machines_meets_on_the_first(environ: Callable[..., None]) -> None:
    environ(**SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]"})
    placement, store = rendezvous.meet(LIMIT)
    assert (placement.one_machine, store) == (False, None)
    assert os.environ["MASTER_ADDR"] == "gpu03"
    assert os.environ["MASTER_PORT"] == str(20000 + 31 * 12 + 3)

    environ(MASTER_ADDR="mine", MASTER_PORT="1", SLURM_JOB_ID="twelve")
    with pytest.raises(UsageError, match="SLURM_JOB_ID='twelve'"):
        rendezvous.meet(LIMIT)
    environ(SLURM_JOB_ID="12")
    rendezvous.meet(LIMIT)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("mine", "1")


def test_the_interface_is_loopback_or_the_way_to_the_master(environ: Callable[..., None]) -> None:
    interfaces.choose_interface(ONE_MACHINE)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"

    environ(GLOO_SOCKET_IFNAME="ib0")  # what the user has set stays
    interfaces.choose_interface(ONE_MACHINE)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"

    del os.environ["GLOO_SOCKET_IFNAME"]
    for wrong in ("no.such.host.invalid", "::1"):
        environ(MASTER_ADDR=wrong)
        interfaces.choose_interface(SEVERAL)
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    del os.environ["NCCL_SOCKET_IFNAME"]
    environ(MASTER_ADDR="127.0.0.1")
    interfaces.choose_interface(SEVERAL)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"  # and no other whose name begins so


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (TORCHRUN, "torchrun started 2 processes but MPI sees 1: start it with mpirun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun started 2 processes but MPI sees 1: start it"),
        (TORCHRUN | {"DDP_STARTED_HERE": "1"}, "start_ranks started 2 processes but MPI sees 1"),
        # torchrun as mpirun's only process: each of its own is rank 0 of 1.
        (
            TORCHRUN | {"PMI_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
            "torchrun started 2 processes but MPI sees 1",
        ),
        (SRUN, "srun started 2 processes but MPI sees 1: add --mpi=pmix"),
        ({"PMI_SIZE": "4"}, "mpirun started 4 processes but MPI sees 1: use the mpirun of the MPI"),
    ],
)
def test_a_group_of_a_launcher_that_mpi_does_not_see_is_refused(
    variables: dict[str, str], told: str, environ: Callable[..., None]
) -> None:
    """Each process would be a world of one, and train on its own in silence."""
    from ddp_from_scratch import mpi

    environ(**variables)
    with pytest.raises(UsageError, match=told):
        mpi.check_launcher()
    for backend in {"gloo", mpi.BACKEND}:
        with pytest.raises(UsageError, match=told):
            dist.init_process_group(backend, init_method="mpi://")
    if mpi.BACKEND == "mpi":
        with pytest.raises(UsageError, match=told):
            dist.init_process_group("mpi")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        TORCHRUN | {"PMI_SIZE": "1"},  # mpirun's, and variables that a shell has left
    ],
)
def test_a_group_of_one_rank_on_purpose(
    variables: dict[str, str], environ: Callable[..., None]
) -> None:
    from ddp_from_scratch import mpi

    environ(**variables)
    dist.init_process_group(mpi.BACKEND, init_method="mpi://")
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_wrong_master_address_is_one_line_at_once() -> None:
    for address, more in (("192.0.2.1", ""), ("no.such.host.invalid", ", an unknown name")):
        with pytest.raises(UsageError) as error:
            start_ranks(["true"], [1, 1], 0, address)
        assert str(error.value) == (
            f"--master-addr must be an address of machine 0, which this is, got {address}{more}"
        )


def test_a_name_that_is_loopback_on_machine_0_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian's /etc/hosts has it: machine 0 would listen where no other machine reaches it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(UsageError) as error:
            start_ranks(["true"], [1, 1], 0, "this-host", port)
        assert str(error.value) == (
            "--master-addr this-host is 127.0.0.1 on this machine: give the address that the other "
            "machines use"
        )
        for on_purpose in ("127.0.0.1", "localhost"):
            with pytest.raises(UsageError, match="is in use on machine 0"):
                start_ranks(["true"], [1, 1], 0, on_purpose, port)


def test_an_address_that_is_silent_does_not_take_the_time_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    def connect(address: object, timeout: float) -> socket.socket:
        limits.append(timeout)
        if len(limits) == 1:
            raise TimeoutError("timed out")
        raise StrangerError("enough")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(UsageError, match="enough"):
        multi_node._await_answer("host", 1, b"secret", 600.0)
    assert limits == [multi_node._ATTEMPT_S] * 2
