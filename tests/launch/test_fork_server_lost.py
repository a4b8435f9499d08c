"""A fork server that is killed ends the job at once, and a line says that it is gone."""

import sys

import pytest

from ddp_from_scratch import start_ranks

# Each rank's parent is the fork server.
KILL = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
TOLD = "the fork server, from which all ranks here were started, was killed by SIGKILL\n"


@pytest.mark.parametrize("max_failures", [None, 3])
def test_a_killed_fork_server_ends_the_job(
    max_failures: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    code = start_ranks([sys.executable, "-c", KILL], [2], max_failures=max_failures, preload=())
    assert (code, capfd.readouterr().err) == (137, TOLD)


def test_a_fork_server_that_cannot_import_ends_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    code = start_ranks([sys.executable, "-c", KILL], [2], max_failures=3, preload=["no_such"])
    told = capfd.readouterr().err
    assert code == 1
    assert told.endswith("ModuleNotFoundError: No module named 'no_such'\n")
