"""Two hosts with a wire between them: network namespaces joined by a veth pair."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from failing_run import RUN_PY, Run

CHECKED = re.compile(r"parameters ([0-9a-f]{16}), bit-identical on 3 ranks\n")
STEPS = 14  # 1,437 images, 3 ranks, batches of 32
GRADIENT_BYTES = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)  # of the MLP, for 8x8


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@dataclass(frozen=True)
class Host:
    """A network namespace with its own loopback and one end of the wire."""

    name: str
    address: str

    def run(self, *command: str) -> Run:
        return Run("ip", "netns", "exec", self.name, sys.executable, RUN_PY, *command)

    def sent_bytes(self) -> int:
        statistics = "/sys/class/net/wire/statistics/tx_bytes"
        return int(ip("netns", "exec", self.name, "cat", statistics))


def missing() -> str | None:
    """Why this machine cannot have network namespaces, if so."""
    if os.getuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs the ip command (iproute2)"
    name = f"ddp-try-{os.getpid()}"
    for arguments in (["add", name], ["delete", name]):
        done = subprocess.run(["ip", "netns", *arguments], capture_output=True, text=True)
        if done.returncode:
            return f"cannot make a network namespace: {done.stderr.strip()}"
    return None


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    both = tuple(Host(f"ddp-{os.getpid()}-{i}", f"10.213.77.{i + 1}") for i in range(2))
    try:
        for host in both:
            ip("netns", "add", host.name)
        first, second = both
        ip("link", "add", "wire", "netns", first.name, "type", "veth",
           "peer", "name", "wire", "netns", second.name)  # fmt: skip
        for host in both:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "wire")
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", "wire", "up")
        yield first, second
    finally:
        for host in both:  # the wire goes with them
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


@pytest.mark.root
def test_unequal_machines_train_in_step_across_a_wire(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    start = ["--nproc", "1,2", "--master-addr", first.address, "--check-sync", "--epochs", "1"]
    before = [host.sent_bytes() for host in hosts]
    with (
        first.run(*start, "--model", "mlp", "--node-rank", "0") as one,
        second.run(*start, "--model", "mlp", "--node-rank", "1") as two,
    ):
        assert one.wait() == 0, f"{one.text}\n{two.text}"
        assert two.wait() == 0, f"{one.text}\n{two.text}"
        assert CHECKED.search(one.out), one.text
        assert "gloo, 3 ranks, " in one.out
        assert two.out == ""  # rank 0 alone speaks
        # But for torch's warning that the address has no name.
        assert "error" not in (one.err + two.err).lower()
    sent = [host.sent_bytes() - was for host, was in zip(hosts, before, strict=True)]
    # Each machine's part of a sum goes to the other at least once.
    assert min(sent) >= STEPS * GRADIENT_BYTES, sent
