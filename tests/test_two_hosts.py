"""Two hosts with a wire between them: network namespaces joined by a veth pair."""

import re
import sys
from collections.abc import Iterator

import pytest
from failing_run import RUN_PY, Run

from benchmarks.network import Host, missing, two_hosts

CHECKED = re.compile(r"parameters ([0-9a-f]{16}), bit-identical on 3 ranks\n")
STEPS = 14  # 1,437 images, 3 ranks, batches of 32
GRADIENT_BYTES = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)  # of the MLP, for 8x8


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    with two_hosts() as both:
        yield both


def run(host: Host, *command: str) -> Run:
    return Run(*host.command(sys.executable, RUN_PY, *command))


@pytest.mark.root
def test_unequal_machines_train_in_step_across_a_wire(hosts: tuple[Host, Host]) -> None:
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
