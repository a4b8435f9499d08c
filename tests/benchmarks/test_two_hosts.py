"""Two hosts with a wire between them: network namespaces joined by a veth pair."""

import re
import subprocess
import sys

import pytest

from benchmarks.harness.network import INTERFACE, missing, two_hosts
from tests.support.failing_run import RUN_PY, Run

STEPS = 14  # 1,437 images, 3 ranks, batches of 32
GRADIENT_BYTES = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)  # of the MLP, for 8x8

pytestmark = [pytest.mark.slow, pytest.mark.root]


def run(hosts, *options):
    """One rank on the first, two on the second."""
    where = ["--nproc", "1,2", "--master-addr", hosts[0].address, "--model", "mlp", *options]
    for node, host in enumerate(hosts):
        command = host.command(sys.executable, RUN_PY, *where, "--node-rank", str(node))
        yield Run(*command, DDP_SECRET="known on both hosts")


@pytest.fixture
def hosts():
    why = missing()
    if why is not None:
        pytest.skip(why)
    with two_hosts() as both:
        yield both


def test_unequal_machines_train_in_step_across_a_wire(hosts):
    before = [host.sent_bytes() for host in hosts]
    one, two = run(hosts, "--check-sync", "--epochs", "1")
    with one, two:
        assert (one.wait(), two.wait()) == (0, 0), f"{one.text}\n{two.text}"
        assert re.search("parameters [0-9a-f]{16}, bit-identical on 3 ranks\n", one.out), one.text
        assert "gloo, 3 ranks, " in one.out
        assert two.out == ""  # rank 0 alone speaks
        # But for torch's warning that the address has no name.
        assert "error" not in (one.err + two.err).lower()
    sent = [host.sent_bytes() - was for host, was in zip(hosts, before, strict=True)]
    # Each machine's part of a sum goes to the other at least once.
    assert min(sent) >= STEPS * GRADIENT_BYTES, sent


def test_a_pulled_cable_ends_both_sides(hosts):
    """The other host sees no carrier, and what it sends is lost."""
    first, second = run(hosts, "--timeout", "5", "--epochs", "10000")
    with first, second:
        first.wait_for("epoch   1")
        subprocess.run(["ip", "-n", hosts[0].name, "link", "set", INTERFACE, "down"], check=True)
        assert [first.wait(15.0), second.wait(15.0)] == [1, 1], f"{first.text}\n{second.text}"
        for each in (first, second):
            # A rank may say it, or the parent that misses the other's signs of life.
            assert each.err.count("lost the other ranks: ") == 1, each.err
            assert "frame #" not in each.err
            assert "Traceback" not in each.err
            each.assert_nobody_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("benchmark", "options", "rows"),
    [
        ("two_hosts", "--quick --rounds 2 --model mlp", ["torch DDP, views", "Reducer, int8"]),
        (
            "compression",
            "--quick",
            ["digits, float32", "digits, int8", "gpt, float32", "gpt, int8"],
        ),
    ],
)
def test_benchmarks(benchmark, options, rows, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *options.split()]
    if (why := missing("tc")) is not None:
        pytest.skip(why)
    with Run(*command, "--results", str(tmp_path)) as run:
        assert run.wait(240.0) == 0, run.text
        for row in rows:
            assert re.search(rf"^{re.escape(row)} .*\d", run.out, re.MULTILINE), run.text
    assert list(tmp_path.glob(f"{benchmark}-*.json"))
