"""Several machines without a launcher: their supervisors agree, fail and leave together."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .errors import UsageError

# Seconds between two attempts to reach machine 0.
_RETRY_S = 0.2


class Machines:
    """What the parents on several machines tell each other, through a store on machine 0.

    Args:
        counts: number of ranks on each machine.
        node_rank: this machine's position in `counts`.
        addr: where machine 0 can be reached.
        port: the port that machine 0 listens on.
        timeout: seconds to wait for the other machines.

    Attributes:
        environment: what the ranks need to use the same store.

    Raises:
        UsageError: the port is taken, `addr` is not machine 0's or does not answer, or the machines
            were given different counts or the same position.
    """

    def __init__(
        self, counts: Sequence[int], node_rank: int, addr: str, port: int, timeout: float
    ) -> None:
        self._node_rank, self._nodes = node_rank, len(counts)
        self._left = False
        if node_rank == 0:
            _check_ours(addr)
        else:
            _await_answer(addr, port, timeout)
        try:
            self._store = dist.TCPStore(
                addr,
                port,
                is_master=node_rank == 0,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            problem = "is in use" if "EADDRINUSE" in str(error) else "cannot be used"
            raise UsageError(
                f"port {port} {problem} on machine 0: choose another with --master-port, on every "
                f"machine"
            ) from error
        # The ranks are clients of this store, as they are of torchrun's agent.
        self.environment = {
            "MASTER_ADDR": addr,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._agree(",".join(str(count) for count in counts))

    def _agree(self, counts: str) -> None:
        if self._store.add(f"machine {self._node_rank}", 1) > 1:
            raise UsageError(f"--node-rank {self._node_rank} was given on two machines")
        if self._node_rank == 0:
            self._store.set("counts", counts)
        first = self._store.get("counts").decode()
        if counts != first:
            self.tell_failure(f"--nproc is {counts} there and {first} on machine 0")
            raise UsageError(f"--nproc is {counts} here and {first} on machine 0: it must be equal")

    def tell_failure(self, text: str) -> None:
        """Tells the other machines that this one has stopped, and why."""
        with suppress(RuntimeError):  # machine 0 is gone: the others notice that by themselves
            self._store.set("failure", f"machine {self._node_rank}: {text}")

    def failure(self) -> str | None:
        """What another machine told, if anything."""
        try:
            return self._store.get("failure").decode() if self._store.check(["failure"]) else None
        except RuntimeError:
            return "machine 0 no longer answers"

    def may_leave(self) -> bool:
        """After this machine's last rank: machine 0 stays until no other needs its store."""
        try:
            if not self._left:
                self._store.add("left", 1)
                self._left = True
            return self._node_rank > 0 or self._store.add("left", 0) >= self._nodes
        except RuntimeError:
            return True  # machine 0 has gone first: after a failure, nobody waits


def _check_ours(addr: str) -> None:
    """On machine 0: torch would look for itself at a wrong address until its time is up."""
    try:
        found = socket.getaddrinfo(addr, 0, type=socket.SOCK_STREAM)
        for family, kind, *_, address in found:
            with suppress(OSError), socket.socket(family, kind) as ours:
                ours.bind(address)
                return
    except socket.gaierror:
        found = []
    raise UsageError(
        f"--master-addr must be an address of machine 0, which this is, got {addr}"
        + ("" if found else ", an unknown name")
    )


def _await_answer(addr: str, port: int, timeout: float) -> None:
    """On the other machines: here and not in torch, which would print its stack at each attempt."""
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((addr, port), max(0.1, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise UsageError(
                    f"machine 0 did not answer at {addr}:{port} within {timeout:g} s "
                    f"({error.strerror or error}): start the command with --node-rank 0 there, and "
                    f"check --master-addr, --master-port and the firewall"
                ) from error
            time.sleep(_RETRY_S)
