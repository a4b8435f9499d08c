"""Thirty of `fuzz.py`'s random programs, and those in which it has found something."""

import pytest
from fuzz import check, run
from fuzz_case import Backward, Case, Forward, Join, Parameter, Weigh, Zero


@pytest.mark.parametrize(
    ("backend", "world_size", "count"), [("gloo", 2, 14), ("gloo", 3, 8), ("mpi", 2, 8)]
)
def test_random_programs_do_what_one_process_does(ranks, backend, world_size, count):
    total = run(lambda: ranks(backend, world_size), world_size, count, seed=4)
    assert total["cases"] >= count


def both(*branches: int) -> Forward:
    return Forward((branches, branches))


TWO = {"world_size": 2, "parameters": (Parameter(2), Parameter(3)), "branches": ((0,), (1,))}
FOUND = {
    "a static graph accumulates what it has not learnt": Case(
        **TWO,
        operations=(
            *(both(0), Backward(), Zero()),
            *(both(1), Backward(no_sync=True), both(0), Backward()),
        ),
        static_graph=True,
    ),
    "a rank without a gradient waits for buffers": Case(
        **TWO,
        operations=(both(0, 1), Backward(), Zero(), Forward(((0, 1), (1,))), Backward()),
        wrapped=True,
        buffers=True,
        divided=True,
    ),
}


AFTER_JOIN = {
    "buffers come from rank 0 again": (both(0, 1), Backward(), both(0, 1), Backward()),
    "ranks are weighed again": (Weigh((1, 3)), both(0, 1), Backward()),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["reducer", "wrapped"])
@pytest.mark.parametrize("name", AFTER_JOIN)
def test_after_a_join(ranks, name, wrapped):
    operations = (Join((1, 2)), *AFTER_JOIN[name])
    check(ranks("gloo", 2), Case(**TWO, operations=operations, wrapped=wrapped, buffers=True))


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(ranks, name):
    assert check(ranks("gloo", 2), FOUND[name])["raised"]


def test_a_difference_is_told_with_its_program(ranks, monkeypatch):
    """The oracle is made to average wrongly."""
    monkeypatch.setattr("fuzz_oracle.Oracle._average", lambda self, indices: None)
    case = Case(**TWO, operations=(both(0, 1), Backward()))
    with pytest.raises(
        AssertionError, match=r"gradients\[0\](.|\n)*in one process(.|\n)*1 Backward"
    ):
        check(ranks("gloo", 2), case)
