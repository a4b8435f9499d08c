"""Runs `run.py` on ranks that become slow or wrong when a file tells them; for `benchmarks.drill`.

In the folder `FAULTS` each process of the elastic job writes the file `pid-N`. It is slow while
there is a file `slow-N`, and wrong once there is a file `wrong-N`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from ddp_from_scratch.launch.rank_process import run_to_exit
from ddp_from_scratch.training.main import main

FAULTS = "DRILL_FAULTS"
SLOWER_S = 0.02  # what a virtual rank of a slow rank takes more; asleep, it slows no other rank


def make_faulty(folder: Path, member: str) -> None:
    """Replaces what this process computes with."""
    import torch.distributed as dist

    from ddp_from_scratch.training import loop
    from ddp_from_scratch.virtual_ranks import recheck

    (folder / f"pid-{member}").write_text(str(os.getpid()))
    slow, wrong = (folder / f"{fault}-{member}" for fault in ("slow", "wrong"))
    right_loss, right_case = loop.cross_entropy, recheck.Case.of
    begun = False  # whether this rank computes wrongly

    def cross_entropy(outputs: Any, labels: Any) -> Any:
        if slow.exists():
            time.sleep(SLOWER_S)
        return right_loss(outputs * (1 + 2**-22) if begun else outputs, labels)

    def case_of(number: int, step: int, parts: Any) -> recheck.Case:
        # What a wrong rank contributes between two checks of it would stay in the parameters. So it
        # begins in a step in which it is checked, or checks.
        nonlocal begun
        case = right_case(number, step, parts)
        begun |= wrong.exists() and dist.get_rank() in (case.owner, case.checker)
        return case

    loop.cross_entropy = cross_entropy
    recheck.Case.of = staticmethod(case_of)  # type: ignore[method-assign]


def run() -> int:
    if (member := os.environ.get("DDP_MEMBER")) is not None:
        make_faulty(Path(os.environ[FAULTS]), member)
    return main(["-m", "benchmarks.harness.faulty_run"], sys.argv[1:])


if __name__ == "__main__":
    run_to_exit(run)
