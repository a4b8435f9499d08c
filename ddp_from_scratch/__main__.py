"""The program `run.py` of an installed package: python -m ddp_from_scratch, or ddp-run."""

import signal

if __name__ == "__main__":
    # As in run.py: Ctrl-C ends the process without a traceback, also while it imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from typing import NoReturn

from ddp_from_scratch.launch.rank_process import replace_closed_streams, run_to_exit
from ddp_from_scratch.training.main import main


def run() -> NoReturn:
    """Runs the command line, also as the script `ddp-run`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    replace_closed_streams()
    run_to_exit(lambda: main(["-m", "ddp_from_scratch"], sys.argv[1:]))


if __name__ == "__main__":
    run()
