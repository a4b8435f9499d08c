"""The program of chapter 14 finds its place under each launcher, as its page says."""

import re
import socket
import sys

import pytest

from tests.support.failing_run import Run
from tests.support.pages import TUTORIAL_PAGES
from tests.tutorial.test_programs import form
from tutorial.chapters import samples

PAGE = TUTORIAL_PAGES[14].read_text()
(UNDER_MPIRUN,) = (s for s in samples(PAGE) if s.command.startswith("mpirun "))
SHOWN = UNDER_MPIRUN.printed
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}
# Whatever PATH says: the Python of this test.
OURS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
(BLOCK,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = {
    line.split()[0]: [part for word in line.split() for part in OURS.get(word, [word])]
    for line in [UNDER_MPIRUN.command, *BLOCK.splitlines()]
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun", "srun"])
def test_its_output_is_what_the_page_shows(launcher, tmp_path):
    with socket.create_server(("localhost", 0)) as probe:
        port = str(probe.getsockname()[1])
    command, places = [*COMMANDS[launcher]], [{}]
    if launcher == "srun":
        command = command[3:]
        places = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} | SRUN for rank in "01"]
    printed = ""
    command += ["--picture", str(tmp_path / "under_mpi.png")]
    for run in [Run(*command, PYTHONPATH="", MASTER_PORT=port, **place) for place in places]:
        with run:
            assert run.wait(80) == 0, run.text
            printed += run.out
    expected = SHOWN.replace("mpirun", launcher).replace("tutorial-pictures", str(tmp_path))
    assert form(printed) == form(expected)
    assert (tmp_path / "under_mpi.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_process_group_closes(tmp_path):
    """A thread of gloo that outlives the group can abort the process as it exits."""
    program = tmp_path / "program.py"
    program.write_text(
        "import importlib, pathlib\n"
        "importlib.import_module('tutorial.14_under_mpi.under_mpi').main()\n"
        "names = [file.read_text() for file in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "assert not any('gloo' in name for name in names), names\n"
    )
    with Run(sys.executable, str(program), "--picture", str(tmp_path / "under_mpi.png")) as run:
        assert run.wait(80) == 0, run.text
