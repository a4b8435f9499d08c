"""The folder of a run that was killed is removed by the next one, and no other."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddp_from_scratch.launch.run_folder import run_folder

HOLD = """
import sys
from ddp_from_scratch.launch.run_folder import run_folder
with run_folder() as folder:
    (folder / "board").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def start(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert run.stdout is not None
    return run, Path(run.stdout.readline().strip())


def test_the_folder_of_a_killed_run_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (killed, left), (running, used) = start(tmp_path), start(tmp_path)
    with killed, running:
        killed.kill()
        killed.wait()
        with run_folder():
            assert left.exists()  # new: its run might not have locked it yet
        foreign = tmp_path / "ddp-something"
        foreign.mkdir()
        for folder in (left, used, foreign):
            os.utime(folder, (0, 0))
        with run_folder() as mine:
            assert set(tmp_path.iterdir()) == {used, foreign, mine}
        running.communicate()
    assert list(tmp_path.iterdir()) == [foreign]
