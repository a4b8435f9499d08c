"""Two hosts with a wire between them: network namespaces joined by a veth pair."""

import re
import signal
import subprocess
import sys

import pytest

from benchmarks.harness.network import INTERFACE, missing, two_hosts
from tests.support.failing_run import RUN_PY, Run

CHECKED = re.compile(r"parameters ([0-9a-f]{16}), bit-identical on 3 ranks\n")
STEPS = 14  # 1,437 images, 3 ranks, batches of 32
GRADIENT_BYTES = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)  # of the MLP, for 8x8

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def hosts():
    why = missing()
    if why is not None:
        pytest.skip(why)
    with two_hosts() as both:
        yield both


def run(host, *command):
    command = host.command(sys.executable, RUN_PY, *command)
    return Run(*command, DDP_SECRET="known on both hosts")


def training(hosts, timeout):
    """One rank on the first, two on the second, for longer than a test lasts."""
    where = ["--nproc", "1,2", "--master-addr", hosts[0].address, "--timeout", timeout]
    what = ["--epochs", "10000", "--model", "mlp"]
    return run(hosts[0], *where, *what, "--node-rank", "0"), run(
        hosts[1], *where, *what, "--node-rank", "1"
    )


def pull_the_cable(host):
    """The other host sees no carrier, and what it sends is lost."""
    subprocess.run(["ip", "-n", host.name, "link", "set", INTERFACE, "down"], check=True)


def test_unequal_machines_train_in_step_across_a_wire(hosts):
    first, second = hosts
    start = ["--nproc", "1,2", "--master-addr", first.address, "--check-sync", "--epochs", "1"]
    before = [host.sent_bytes() for host in hosts]
    with (
        run(first, *start, "--model", "mlp", "--node-rank", "0") as one,
        run(second, *start, "--model", "mlp", "--node-rank", "1") as two,
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


def test_a_pulled_cable_ends_both_sides(hosts):
    first, second = training(hosts, timeout="5")
    with first, second:
        first.wait_for("epoch   1")
        pull_the_cable(hosts[0])
        assert [first.wait(15.0), second.wait(15.0)] == [1, 1], f"{first.text}\n{second.text}"
        for run in (first, second):
            # A rank may say it, or the parent that misses the other's signs of life.
            assert run.err.count("lost the other ranks: ") == 1, run.err
            assert "frame #" not in run.err
            assert "Traceback" not in run.err
            run.assert_nobody_left()


def test_signals_are_heard_when_the_cable_is_out(hosts):
    first, second = training(hosts, timeout="600")
    with first, second:
        first.wait_for("epoch   1")
        pull_the_cable(hosts[1])
        for run in (first, second):
            run.signal(signal.SIGTERM)
            run.wait_for("stopping all ranks; once more ends them at once")
            run.signal(signal.SIGTERM)
            assert run.wait(10.0) == 143, run.text
            run.assert_nobody_left()
