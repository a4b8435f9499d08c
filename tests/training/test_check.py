"""`run.py --check`: what is repeated, what is printed, and the exit code."""

import re
from unittest.mock import patch

import pytest

from ddp_from_scratch.training import check as module
from ddp_from_scratch.training.check import check, lines_of
from ddp_from_scratch.training.settings import Settings
from tests.support.failing_run import LAUNCHERS, RUN_PY, Run


def test_a_slow_rank_is_marked():
    assert lines_of(("a", "a", "b"), (0.01, 0.0119, 0.02), (1200, 7, 3)) == [
        "rank 0 on a: 10.00 ms (of 1,200 times)",
        "rank 1 on a: 11.90 ms (of 7 times)",
        "rank 2 on b: 20.00 ms (of 3 times), slow: 2.0 times the fastest",
    ]


def codes(world, wrong, options):
    """The exit code, and how often a batch was computed in a repetition."""
    right, factor = module.cross_entropy, 1.5 if world.rank == wrong else 1
    sizes = []

    def faulty(outputs, labels):
        sizes.append(len(labels))
        return right(outputs * factor, labels)

    with patch.object(module, "cross_entropy", faulty):
        code = check(Settings(check=0.05, quiet=True, **options), world)
    return code, {*sizes}


def test_the_exit_code_is_that_of_all_ranks(ranks):
    options = {"global_batch_size": 48, "accumulate": 2}
    assert ranks("gloo", 3)(codes, None, options) == [(0, {8})] * 3
    options = {"virtual_ranks": 4, "batch_size": 5, "precision": "bf16"}
    assert ranks("gloo", 3)(codes, 1, options) == [(1, {5})] * 3


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("launcher", ["none", "mpirun"])
def test_a_check_trains_nothing(launcher, tmp_path):
    command = [*LAUNCHERS[launcher], RUN_PY, "--check", "0.5", "--checkpoint-dir", str(tmp_path)]
    command += ["--backend", "mpi"] if launcher == "mpirun" else ["--elastic", "--balance"]
    with Run(*command) as run:
        assert run.wait() == 0, run.text
        found = run.out
    line = r"rank {} on \S+: [\d.]+ ms \(of [\d,]+ times\)(, slow: .* times the fastest)?\n"
    told = r"all 2 ranks computed the same bits, at least [\d,]+ times each\n"
    assert re.fullmatch(line.format(0) + line.format(1) + told, found), found
    assert [*tmp_path.iterdir()] == []
