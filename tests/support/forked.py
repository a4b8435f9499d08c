"""Programs on ranks that are forked from a process which has imported torch: it takes seconds."""

import os
import signal
import sys
import tempfile
from pathlib import Path

from ddp_from_scratch.launch.environment import rank_environments
from tests.support.ranks import ROOT, fork_server

# Runs a file, or -m and a module, as a launcher's rank in this folder, printing to this file.
_START = """
import os, runpy, sys, torch
_, root, folder, output, *sys.argv = sys.argv
sys.path[:1] = [folder, root]
os.chdir(folder)
stream = os.open(output, os.O_WRONLY | os.O_CREAT)
os.dup2(stream, 1)
os.dup2(stream, 2)
if "RANK" in os.environ:
    torch.set_num_threads(1)
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # to take all of torch's objects apart takes seconds
"""


def run(command: list[str], world_size: int, folder: Path) -> str:
    """The output of all ranks, which must end with 0; one rank has no launcher."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    if world_size > 1:
        environ |= {"DDP_RENDEZVOUS_FILE": str(folder / "rendezvous")}
    outputs = [folder / f"output-{rank}" for rank in range(world_size)]
    places = rank_environments([world_size], 0) if world_size > 1 else [{}]
    ranks = []
    try:
        for place, output in zip(places, outputs, strict=True):
            line = [sys.executable, "-c", _START, str(ROOT), str(folder), str(output)]
            ranks.append(fork_server().start([*line, *command], environ | place))
        codes = [rank.wait() for rank in ranks]
    finally:
        for started in ranks:
            started.send_signal(signal.SIGKILL)
    printed = "\n".join(output.read_text() for output in outputs)
    assert codes == [0] * world_size, printed
    return printed
