"""Two hosts on one machine: network namespaces with a wire between them. Linux, as root.

       host 0, 10.213.77.1             host 1, 10.213.77.2
    +-----------------------+       +-----------------------+
    |  ranks   lo   [wire]--|--tbf--|--[wire]   lo   ranks  |
    +-----------------------+  tbf  +-----------------------+

Each host has its own loopback; bytes to the other host cross the wire, a veth pair. A token bucket
(`tc-tbf`) at each end limits the speed in each direction. The hosts share the processor and the
memory, so they compute half as fast as real ones.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.contenders import Contender
from ddp_from_scratch.bench.timing import WARM_UP
from ddp_from_scratch.launch.environment import mpirun_command, rank_environments

INTERFACE = "wire"
_COUNTERS = Path(f"/sys/class/net/{INTERFACE}/statistics")
_NAME = re.compile(r"ddp-(\d+)-[01]")  # of a namespace: ddp-<pid of its maker>-<number>

# A single connection, Open MPI's default, sends in only one direction at a time.
_MPI_LINKS = "2"

# Silences torch's warning that these addresses have no names.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Host:
    """A network namespace with its own loopback and one end of the wire."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Returns a command line that runs `command` on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def named_command(self, *command: str) -> list[str]:
        """Also sets the host's name to its address, which needs no name server."""
        rename = 'hostname "$0" && exec "$@"'
        return self.command("unshare", "--uts", "sh", "-c", rename, self.address, *command)

    def sent_bytes(self) -> int:
        """Returns the bytes that this host has sent over the wire so far, including headers."""
        return int(_run(*self.command("cat", str(_COUNTERS / "tx_bytes"))))


def crossed_bytes() -> tuple[int, int]:
    """On a host, returns the bytes sent and received over the wire so far, including headers."""
    sent, received = ((_COUNTERS / f"{way}_bytes").read_text() for way in ("tx", "rx"))
    return int(sent), int(received)


def missing(*tools: str) -> str | None:
    """Returns why this machine cannot have such hosts with `ip` and these tools, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.getuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", *tools):
        if shutil.which(tool) is None:
            return f"needs the {tool} command (Debian: apt install iproute2 util-linux)"
    # Root in a container may still lack the permission, so try it.
    name = f"ddp-try-{os.getpid()}"
    for action in ("add", "delete"):
        done = subprocess.run(["ip", "netns", action, name], capture_output=True, text=True)
        if done.returncode:
            return f"cannot make a network namespace: {done.stderr.strip()}"
    return None


def check_available(backends: Sequence[str]) -> None:
    """Raises a UsageError unless this machine can have two hosts, which Open MPI can span."""
    why = missing("tc", *(["unshare"] if "mpi" in backends else []))
    if why is not None:
        raise UsageError(f"two hosts on one machine: {why}")
    if "mpi" in backends:
        mpirun_command(1, [])  # raises if there is no mpirun


@contextmanager
def two_hosts(gbit: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Makes the hosts, and removes them with every process on them.

    `gbit` is the wire's speed in Gbit/s in each direction; None means no limit.
    """
    _remove_forgotten()
    both = tuple(Host(f"ddp-{os.getpid()}-{i}", f"10.213.77.{i + 1}") for i in range(2))
    first, second = both
    try:
        for host in both:
            _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", INTERFACE, "netns", first.name, "type", "veth",
             "peer", "name", INTERFACE, "netns", second.name)  # fmt: skip
        for host in both:
            at = ("ip", "-n", host.name)
            _run(*at, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _run(*at, "link", "set", "lo", "up")
            _run(*at, "link", "set", INTERFACE, "up")
            if gbit is not None:
                # The bytes that may leave at once cover a timer that is a millisecond late.
                burst = max(256 * 1024, int(gbit * 1e9 / 8 * 1e-3))
                bucket = ["rate", f"{gbit:g}gbit", "burst", str(burst), "latency", "50ms"]
                _run("tc", "-n", host.name, "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                     *bucket)  # fmt: skip
        yield first, second
    finally:
        for host in both:
            _remove(host.name)


def run_ranks(hosts: Sequence[Host], per_host: int, backend: str, command: Sequence[str]) -> int:
    """Runs `command` on `per_host` ranks of each host; the first failure ends all of them.

    Call it under `stoppable`, so that Ctrl-C and SIGTERM end them, too. On gloo the ranks meet at a
    port of the first host; on mpi, Open MPI's mpirun runs there, and its daemon on the others.
    Returns 0, or the exit code of the first process that failed; 128 + N after signal N.
    """
    if backend != "mpi":
        counts = [per_host] * len(hosts)
        # The wire's address makes the ranks meet, and then communicate, over the wire.
        meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", **_QUIET}
        return _run_together(
            (host.command(*command), meeting | rank)
            for node, host in enumerate(hosts)
            for rank in rank_environments(counts, node)
        )
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_agent(hosts))
        agent.chmod(0o700)
        settings = {
            # Fixed, so that no other transport bypasses the wire.
            "pml": "ob1",
            "btl": "self,sm,tcp",  # sm within a host
            "btl_tcp_if_include": INTERFACE,
            "btl_tcp_links": _MPI_LINKS,
        }
        options = ["--prtemca", "plm_ssh_agent", str(agent)]
        options += ["--host", ",".join(f"{host.address}:{per_host}" for host in hosts)]
        options += ["--map-by", "slot:oversubscribe"]
        for name, value in settings.items():
            options += ["--mca", name, value]
        (mpirun, *of_one_machine), environ = mpirun_command(len(hosts) * per_host, command)
        # Settings for one machine would override these options.
        environ = {name: value for name, value in environ.items() if "OMPI_MCA" not in name}
        environ |= _QUIET
        for name in ("PATH", "PYTHONPATH", *_QUIET):
            if name in os.environ | environ:
                options += ["-x", name]
        full = hosts[0].named_command(mpirun, *options, *of_one_machine)
        return _run_together([(full, environ)])


@contextmanager
def stoppable() -> Iterator[None]:
    """Makes SIGTERM unwind like Ctrl-C, so that nothing is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _agent(hosts: Sequence[Host]) -> str:
    """Returns the shell script that Open MPI runs instead of ssh: `agent HOST COMMAND...`."""
    cases = [
        f'{host.address}) exec {shlex.join(host.named_command("sh", "-c"))} "$*" ;;'
        for host in hosts
    ]
    return "\n".join(["#!/bin/sh", "address=$1; shift", "case $address in", *cases, "esac", ""])


def _run_together(started: Iterable[tuple[list[str], Mapping[str, str]]]) -> int:
    children: list[subprocess.Popen[bytes]] = []
    try:
        for command, environ in started:
            # In its own session, so Ctrl-C reaches it only through `finally`.
            child = subprocess.Popen(
                command,
                env=os.environ | environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            children.append(child)
        while True:
            codes = [child.poll() for child in children]
            failed = next((code for code in codes if code), 0)
            if failed:
                return failed if failed > 0 else 128 - failed
            if None not in codes:
                return 0
            time.sleep(0.05)
    finally:
        _end(children)


def _end(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    # On SIGTERM, mpirun ends its daemons and their ranks; after SIGKILL they would stay.
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        for child in children:
            if child.poll() is None:
                child.send_signal(number)
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(patience)


def _remove(name: str) -> None:
    """Removes a namespace, its processes and the wire. Idempotent."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _remove_forgotten() -> None:
    """Removes hosts whose maker was killed before it could remove them."""
    for line in _run("ip", "netns", "list").splitlines():
        found = _NAME.match(line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


# The bytes on the wire ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One contender across one wire."""

    name: str
    milliseconds: list[float]  # of the slowest rank, by round
    must_cross: int | None  # bytes that each host must send in a step; None if unknown
    sent: list[list[int]]  # bytes by host and round, by the counter of the host's interface
    # The least ms of a step: until the first bucket is ready and on the wire, or without
    # communication if that is more. None if `must_cross` is None.
    bound: float | None

    @property
    def most_sent(self) -> float:
        """The median bytes per step of the host that sends more."""
        return max(float(np.median(of_host)) for of_host in self.sent)

    @property
    def over_bound(self) -> float | None:
        """The median step as a multiple of the bound; None if no bytes are known to cross."""
        if not self.bound or not self.must_cross:
            return None
        return float(np.median(self.milliseconds)) / self.bound


def limit_ms(nbytes: float, gbit: float) -> float:
    """Returns the milliseconds that the wire needs for `nbytes`, without headers."""
    return nbytes * 8 / (gbit * 1e9) * 1e3


class Meter:
    """Counts the bytes that this host sends over the wire in each step.

    It reads the counter after the barrier before each step, when all bytes of the last step have
    arrived. The count includes the barrier, some hundred bytes.
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        self._last, self._name = crossed_bytes()[0], ""

    def before(self, contender: Contender) -> Callable[[], None]:
        """Returns the contender's step with a reading before it."""

        def step() -> None:
            self.read()
            self._name = contender.name
            contender.step()

        return step

    def read(self) -> None:
        """Attributes the bytes since the last reading to the last step."""
        now = crossed_bytes()[0]
        self.sent.setdefault(self._name, []).append(now - self._last)
        self._last = now


def gather_sent(meter: Meter, counts: bool) -> dict[str, list[list[int]]]:
    """Returns, by contender, the bytes that each host sent in each timed step. Collective.

    `counts` is True on one rank per host, whose meter counts.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, meter.sent if counts else None)
    hosts = [sent for sent in everyone if sent is not None]  # in the order of ranks, so of hosts
    return {name: [of_host[name][WARM_UP:] for of_host in hosts] for name in hosts[0] if name}


def check_crossed(results: list[Result], gbit: float) -> None:
    """Raises a RuntimeError if a host sent less than it must, or faster than the wire allows."""
    for r in results:
        for host, sent in enumerate(r.sent):
            for milliseconds, nbytes in zip(r.milliseconds, sent, strict=True):
                # Shared memory or loopback between the hosts would give a faster, wrong result.
                if nbytes < (r.must_cross or 0):
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in a step, and "
                        f"{r.must_cross:,} must cross: it went round the wire"
                    )
                # The token bucket sends a burst at once.
                if limit_ms(nbytes, gbit) > 1.02 * milliseconds + 10:
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in {milliseconds:.0f} "
                        f"ms: more than {gbit:g} Gbit/s"
                    )
