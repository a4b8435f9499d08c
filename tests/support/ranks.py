"""Runs a test's function on every rank of a real process group, and cannot hang.

    results = ranks("gloo", 2)(average_of, 3.0)      # calls average_of(world, 3.0) on both ranks

A crew of ranks serves all tests of a backend and world size. mpi's import torch; all others are
forked from one process that has. A test that fails on some rank, or does not end in time, fails
with every rank's traceback or stack, and its crew is replaced.
"""

import atexit
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, BinaryIO

from ddp_from_scratch.launch.environment import rank_environments
from ddp_from_scratch.launch.fork_server import OPTIMIZERS, ForkServer, RemoteRank, can_fork

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 90.0
CALL_LIMIT_S = 60.0
LIMIT_S = CALL_LIMIT_S / 2  # of a collective


class Crew:
    """The ranks of one process group, waiting for functions to call; `fresh` ones for one test."""

    def __init__(self, backend: str, world_size: int, fresh: bool = False) -> None:
        self.backend, self.world_size = backend, world_size
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self._log = Path(self._folder.name) / "log"
        address = str(Path(self._folder.name) / "socket")
        command = [sys.executable, str(Path(__file__)), backend, address, f"fresh={fresh}"]
        found: dict[int, tuple[int, Connection]] = {}
        with Listener(address, "AF_UNIX") as listener, self._log.open("ab") as log:
            self._launchers = [self._launch(c, e, log) for c, e in self._commands(command)]
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            deadline = time.monotonic() + START_LIMIT_S
            while len(found) < world_size and time.monotonic() < deadline and not self.ended:
                with suppress(TimeoutError):
                    connection = listener.accept()
                    rank, pid = connection.recv()
                    found[rank] = (pid, connection)
        if len(found) < world_size:
            log_text = self._read_log()
            self.end()
            raise AssertionError(f"the ranks did not start:\n{log_text}")
        self.pids = [found[rank][0] for rank in range(world_size)]
        self._connections = [found[rank][1] for rank in range(world_size)]

    def _launch(
        self, command: list[str], environ: dict[str, str], log: BinaryIO
    ) -> "subprocess.Popen[bytes] | RemoteRank":
        # Whatever a rank starts has as many threads as the rank: another number, other bits.
        environ |= {"OMP_NUM_THREADS": "1"}
        if can_fork(command):
            return fork_server().start([*command, log.name], environ)
        return subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, start_new_session=True
        )

    def _commands(self, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        if self.backend == "mpi":
            return [(["mpirun", "-n", str(self.world_size), *command], os.environ | MPIRUN)]
        environ = os.environ | {"DDP_RENDEZVOUS_FILE": str(Path(self._folder.name) / "rendezvous")}
        return [
            (command, environ | place | (on_gpu(rank) if self.backend == "nccl" else {}))
            for rank, place in enumerate(rank_environments([self.world_size], 0))
        ]

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        limit: float = CALL_LIMIT_S,
        dies: int | None = None,
    ) -> list[Any]:
        """Calls `function(world, *arguments)` on every rank; the rank `dies` ends its process."""
        for connection in self._connections:
            connection.send((function, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while missing := sorted({*range(self.world_size)} - results.keys() - errors.keys()):
            ready = wait([self._connections[rank] for rank in missing], limit)
            if not ready:
                told = "\n".join([*errors.values(), self._stacks()])
                self.end()
                raise AssertionError(f"ranks {missing} did not end within {limit:g} s\n{told}")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    good, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    good, value = rank == dies, f"the process ended\n{self._read_log()}"
                    value = None if good else value
                (results if good else errors)[rank] = value
            if errors:
                limit = min(limit, 3.0)  # the others may be waiting for the rank that failed
        if errors:
            self.end()
            raise AssertionError("\n".join(f"rank {r}: {e}" for r, e in sorted(errors.items())))
        return [results[rank] for rank in range(self.world_size)]

    @property
    def ended(self) -> bool:
        return any(launcher.poll() is not None for launcher in self._launchers)

    def end(self) -> None:
        for launcher in self._launchers:
            # mpirun cleans up after itself if it is let; ranks that hang are killed all the same.
            launcher.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 3.0
            while launcher.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if launcher.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def _stacks(self) -> str:
        for rank, pid in enumerate(self.pids):
            with self._log.open("a") as log:
                log.write(f"\nrank {rank}:\n")
            os.kill(pid, signal.SIGUSR2)
            time.sleep(0.3)
        return self._read_log()

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace")[-20000:]


@cache
def fork_server() -> ForkServer:
    ours = ("world", "optim.flat_optimizer", "torch_ddp.wrapper")
    server = ForkServer([*(f"ddp_from_scratch.{module}" for module in ours), OPTIMIZERS])
    atexit.register(server.kill)
    return server


MPIRUN = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "self,vader",
}


def on_gpu(rank: int) -> dict[str, str]:
    """Gives each rank of nccl a GPU; ranks that share one look to NCCL like several machines'."""
    import torch

    count = torch.cuda.device_count()
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    if count > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        return alone | {"CUDA_VISIBLE_DEVICES": names[rank]}
    return alone | {
        "NCCL_HOSTID": f"machine-{rank}",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def listening() -> list[tuple[str, int, str]]:
    """The address, port and inode of each socket that listens."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, _, port = local.partition(":")
            found += [(address, int(port, 16), inode)] * (state == "0A")
    return found


def _node_group() -> Any:
    """The world of a crew whose default group is of the node backend, opened by torch."""
    import datetime

    import torch
    import torch.distributed as dist

    import ddp_from_scratch as ddp
    from ddp_from_scratch.node import ProcessGroupNode

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["DDP_RENDEZVOUS_FILE"], size)
    options = {"store": store, "rank": rank, "world_size": size}
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group(ProcessGroupNode.backend, timeout=limit, **options)
    return ddp.World(rank, size, rank, size, 0, "none", "node", torch.device("cpu"))


def serve(backend: str, address: str, fresh: str, log: str | None = None) -> None:
    """A rank: calls what the test sends, until the test is gone; prints to `log`, if given."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    import torch
    import torch._dynamo  # the first optimizer does, for seconds: not while a test's time runs

    import ddp_from_scratch as ddp
    from tests.support.rank_state import unchanged

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # a GPU's convolutions have the CPU's precision
    if backend in ("legacy", "nccl2"):
        from tests.support.simgpu import device, nccl

        device.install()
        nccl.install(backend)
        backend = "nccl"
    opened = _node_group() if backend == "node" else ddp.process_group(backend, timeout=LIMIT_S)
    with opened as world:
        connection = Client(address, "AF_UNIX")
        connection.send((world.rank, os.getpid()))
        around = nullcontext if fresh == "fresh=True" else unchanged
        gc.freeze()  # a collection after a test looks only at what the test has made
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            try:
                with around():
                    torch.manual_seed(0)  # models that ranks make are equal
                    reply = (True, function(world, *arguments))
            except BaseException:  # noqa: BLE001  # a test sees everything
                reply = (False, traceback.format_exc())
            connection.send(reply)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    serve(*sys.argv[1:])
