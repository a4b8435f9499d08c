"""Random programs on simulated GPUs: the numbers of one process, and no operation comes too early.

python -m tests.support.fuzz --backend nccl2 --cases 1000
"""

import pytest

from tests.support.tiers import slow

pytest.importorskip("hypothesis")

from tests.support.fuzz import check, gpu_cases, run


@pytest.mark.parametrize("count", [6, slow(20)])
def test_random_programs_do_what_one_process_does(sim, count):
    assert run(lambda case: check(sim, case), gpu_cases(2), count, seed=4)["cases"] >= count
