"""In a rank: what the process that started it has left there, and living no longer than it."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

from ddp_from_scratch.launch.environment import launcher

# Variables that `supervisor` leaves to its ranks: a file where they meet, if they are all on one
# machine, or else machine 0's address (MASTER_ADDR is the way through this parent); its process id;
# and the terminal behind standard output (1) and standard error (2).
RENDEZVOUS_FILE = "DDP_RENDEZVOUS_FILE"
MACHINE_0 = "DDP_MACHINE_0"
PARENT = "DDP_PARENT_PID"
TERMINAL = "DDP_TERMINAL_"

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a rank: be killed when the process that started it is gone. Linux only.

    A no-op where no launcher waits for its ranks: one started by hand may outlive its shell.
    """
    parent = os.environ.get(PARENT)
    launched = launcher() == "mpirun" or "TORCHELASTIC_RUN_ID" in os.environ
    if not sys.platform.startswith("linux") or (parent is None and not launched):
        return
    die_with(os.getppid() if parent is None else int(parent))


def die_with(parent: int) -> None:
    """Has the system kill this process when its parent is gone. Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def write_to_terminal() -> None:
    """In a rank that `start_mpirun` started on a terminal: print there, not through mpirun.

    mpirun holds a line back until it is whole, and a progress bar never is. A no-op elsewhere.
    """
    for output in (1, 2):
        path = os.environ.get(f"{TERMINAL}{output}")
        if path is not None:
            with suppress(OSError):
                terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
                os.dup2(terminal, output)
                os.close(terminal)
