"""Thirty of `fuzz.py`'s random programs, and those in which it has found something."""

import pytest

pytest.importorskip("hypothesis")

from tests.support.fuzz import cases, check, run
from tests.support.fuzz_case import (
    Again,
    Backward,
    Case,
    Forward,
    Join,
    Move,
    Parameter,
    Step,
    Transform,
    Weigh,
    Zero,
)
from tests.support.tiers import slow


@pytest.mark.parametrize(
    ("backend", "world_size", "count"), [slow("gloo", 2, 14), ("gloo", 3, 8), ("mpi", 2, 8)]
)
def test_random_programs_do_what_one_process_does(ranks, backend, world_size, count):
    def check_one(case):
        return check(ranks(backend, world_size), case)

    assert run(check_one, cases(world_size), count, seed=4)["cases"] >= count


def both(*branches: int) -> Forward:
    return Forward((branches, branches))


def case(*operations, **settings) -> Case:
    return Case(2, (Parameter(2), Parameter(3)), ((0,), (1,)), operations, **settings)


ONE_USES_BOTH = Forward(((0, 1), (1,)))
LOCAL_STEP = (both(0, 1), Backward(no_sync=True), Step(), Zero())
AFTER_LOCAL_STEP = (*LOCAL_STEP, both(0, 1), Backward())
BUFFERS_AFTER_JOIN = (Join((1, 2)), both(0, 1), Backward(), both(0, 1), Backward())
WEIGHED_AFTER_JOIN = (Join((1, 2)), Weigh((1, 3)), both(0, 1), Backward())
FOUND = {
    "buffers after a join, wrapped": case(*BUFFERS_AFTER_JOIN, buffers=True, wrapped=True),
    "weights after a join, wrapped": case(*WEIGHED_AFTER_JOIN, buffers=True, wrapped=True),
    "a branch below a batch norm over all ranks, on one rank": case(
        *(ONE_USES_BOTH, Backward(), Zero(), both(0, 1), Backward()),
        find_unused_parameters=True,
        batch_norm=True,
        bucket_cap_mb=0,
    ),
    "gradients moved between passes, and back in their bucket": case(
        *(both(0, 1), Backward(), Move(), Step(), Zero(), both(0, 1), Backward(), Step()),
        gradient_as_bucket_view=True,
        flat=True,
        large=True,
    ),
    "a weight gradient in its bucket, and another one of the same weight": case(
        *(both(0, 1), Backward(no_sync=True), both(0, 1), Backward(), Step(), Zero()),
        *(both(0, 1), Backward(keep=True), Backward(), Step()),
        checkpoint="not reentrant",
        fuse_wgrad=True,
        large=True,
    ),
    "a second Reducer, and a parameter that it never saw": case(
        *(both(0, 1), Backward(no_sync=True), Again(), both(1), Backward(), Step()),
        find_unused_parameters=True,
    ),
    "a transform of torch.func in a static graph's model": case(
        *(both(0, 1), Backward(), Zero(), Transform(0), both(0, 1), Backward()), static_graph=True
    ),
    "error: a rank without a gradient waits for buffers": case(
        *(both(0, 1), Backward(), Zero(), ONE_USES_BOTH, Backward()),
        wrapped=True,
        buffers=True,
        divided=True,
    ),
    "error: own writes, and a second gradient before ranks are compared": case(
        *(both(0, 1), Backward(outputs="first", keep=True), Backward()), writes="own"
    ),
    "error: writes after a local step, wrapped": case(
        *AFTER_LOCAL_STEP, writes="own", static_graph=True, wrapped=True
    ),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_what_it_has_found(ranks, name, backend):
    assert check(ranks(backend, 2), FOUND[name])["raised"] == name.startswith("error: ")


def test_a_difference_is_told_with_its_program(ranks, monkeypatch):
    """The oracle is made to average wrongly."""
    monkeypatch.setattr("tests.support.fuzz_oracle.Oracle._average", lambda self, indices: None)
    told = r"gradients\[0\](.|\n)*in one process(.|\n)*1: Backward"
    with pytest.raises(AssertionError, match=told):
        check(ranks("gloo", 2), case(both(0, 1), Backward()))
