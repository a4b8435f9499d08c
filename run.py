"""Trains an image classifier on several processes at once: python run.py --help."""

import signal

if __name__ == "__main__":
    # Ctrl-C ends the process without a traceback, also while it imports, until there is something
    # to save or to stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys

from ddp_from_scratch.launch.rank_process import replace_closed_streams, run_to_exit
from ddp_from_scratch.training.main import main

if __name__ == "__main__":
    replace_closed_streams()
    run_to_exit(lambda: main([os.path.abspath(__file__)], sys.argv[1:]))
