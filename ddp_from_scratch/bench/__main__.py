"""python -m ddp_from_scratch.bench: see main.py."""

import sys

from ddp_from_scratch.bench.main import main
from ddp_from_scratch.launch.rank_process import run_to_exit

if __name__ == "__main__":
    run_to_exit(lambda: main(sys.argv[1:]))
