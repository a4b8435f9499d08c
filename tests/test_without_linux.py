"""What works without Linux, on Linux: programs do not find what macOS lacks.

`support/without_linux/sitecustomize.py` hides it. Nobody has run this on a Mac.
"""

import os
import re
import sys

import pytest

from tests.support.failing_run import LAUNCHERS, RUN_PY, Run
from tests.support.pages import excerpts
from tests.support.ranks import ROOT

pytestmark = pytest.mark.slow
MAC = os.pathsep.join([str(ROOT / "tests/support/without_linux"), str(ROOT)])
(README,) = [excerpt for excerpt in excerpts("python") if excerpt.page == ROOT / "README.md"]


def printed_by(*command: str, code: int = 0) -> str:
    with Run(*command, PYTHONPATH=MAC) as run:
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        assert code or run.err == ""
        return run.err if code else run.out


def test_what_a_mac_lacks_is_hidden():
    """Otherwise the other tests would show nothing."""
    program = """
import os, sys
import ddp_from_scratch
from ddp_from_scratch.backend import shared_memory, transport
from ddp_from_scratch.common import memory
from ddp_from_scratch.launch import ancestors, fork_server
assert not fork_server.can_fork([sys.executable, "program.py"])
assert not shared_memory.SEMAPHORES_AVAILABLE
assert memory._libc is None
assert transport.this_machine() == f"process {os.getpid()}"
assert [*ancestors.ancestors()] == [os.getppid()]
"""
    printed_by(sys.executable, "-c", program)


@pytest.mark.parametrize("options", [[], ["--elastic"]])
def test_run_py_trains_two_ranks(options):
    printed = printed_by(sys.executable, RUN_PY, "--nproc", "2", "--epochs", "1", *options)
    assert "gloo, 2 ranks, global batch 64" in printed
    assert float(re.search(r"digits test accuracy (\S+)", printed)[1]) > 0.8


def test_run_py_refuses_to_share_memory_in_one_line():
    printed = printed_by(sys.executable, RUN_PY, "--shard", "node", code=2)
    told = r'error: SGD\(shard="node"\) needs ranks that share memory, on Linux: [^\n]*\n'
    assert re.fullmatch(told, printed)


def test_the_ranks_of_a_failing_program_end():
    program = 'import ddp_from_scratch as ddp\nwith ddp.process_group("gloo") as w: assert w.rank'
    printed = printed_by(*LAUNCHERS["start_ranks"], "-c", program, code=1)
    assert "AssertionError" in printed


def test_the_example_of_the_readme(tmp_path):
    file = tmp_path / "example.py"
    file.write_text(README.code)
    printed = printed_by(*LAUNCHERS["torchrun"], str(file))
    ranks = re.findall(r"rank (\d) of 2: parameters (\w{16})", printed)
    assert sorted(rank for rank, _ in ranks) == ["0", "1"]
    assert len({checksum for _, checksum in ranks}) == 1


def test_a_program_of_the_tutorial(tmp_path):
    program = "env", "-C", str(tmp_path), sys.executable, "-m", "tutorial.06_overlap.overlap"
    assert "picture: " in printed_by(*program)
