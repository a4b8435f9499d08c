"""Thirty of `fuzz.py`'s random programs, and those in which it has found something."""

import pytest

pytest.importorskip("hypothesis")

from tests.support.fuzz import cases, check, check_shards, run, sharded_cases
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


@pytest.mark.parametrize(("backend", "count"), [("gloo", 12), slow("mpi", 12)])
def test_random_programs_on_shards_have_one_result(ranks, backend, count):
    def check_one(case):
        check_shards([ranks("gloo", 1), ranks(backend, 2), ranks(backend, 3)], case)

    assert run(check_one, sharded_cases(4), count, seed=4)["cases"] >= count // 2


def both(*branches: int) -> Forward:
    return Forward((branches, branches))


TWO = {"world_size": 2, "parameters": (Parameter(2), Parameter(3)), "branches": ((0,), (1,))}
AFTER_JOIN = {
    "buffers come from rank 0 again": (both(0, 1), Backward(), both(0, 1), Backward()),
    "ranks are weighed again": (Weigh((1, 3)), both(0, 1), Backward()),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["reducer", "wrapped"])
@pytest.mark.parametrize("name", AFTER_JOIN)
def test_after_a_join(ranks, name, wrapped):
    operations = (Join((1, 2)), *AFTER_JOIN[name])
    check(ranks("gloo", 2), Case(**TWO, operations=operations, wrapped=wrapped, buffers=True))


ONE_USES_BOTH = Forward(((0, 1), (1,)))
TOGETHER = {
    "a branch below a batch norm over all ranks, on one rank": Case(
        **TWO,
        operations=(ONE_USES_BOTH, Backward(), Zero(), both(0, 1), Backward()),
        find_unused_parameters=True,
        batch_norm=True,
        bucket_cap_mb=0,
    ),
    "gradients moved between passes, and back in their bucket": Case(
        **TWO,
        operations=(both(0, 1), Backward(), Move(), Step(), Zero(), both(0, 1), Backward(), Step()),
        gradient_as_bucket_view=True,
        flat=True,
        large=True,
    ),
    "a weight gradient in its bucket, and another one of the same weight": Case(
        **TWO,
        operations=(
            *(both(0, 1), Backward(no_sync=True), both(0, 1), Backward(), Step(), Zero()),
            *(both(0, 1), Backward(keep=True), Backward(), Step()),
        ),
        checkpoint="not reentrant",
        fuse_wgrad=True,
        large=True,
    ),
    "a second Reducer, and a parameter that it never saw": Case(
        **TWO,
        operations=(both(0, 1), Backward(no_sync=True), Again(), both(1), Backward(), Step()),
        find_unused_parameters=True,
    ),
    "a transform of torch.func in a static graph's model": Case(
        **TWO,
        operations=(both(0, 1), Backward(), Zero(), Transform(0), both(0, 1), Backward()),
        static_graph=True,
    ),
}


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("name", TOGETHER)
def test_two_features_together(ranks, name, backend):
    assert not check(ranks(backend, 2), TOGETHER[name])["raised"]


LOCAL_STEP = (both(0, 1), Backward(no_sync=True), Step(), Zero())
REFUSED = {
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
        operations=(both(0, 1), Backward(), Zero(), ONE_USES_BOTH, Backward()),
        wrapped=True,
        buffers=True,
        divided=True,
    ),
    "weights beside a batch norm over all ranks": Case(
        **TWO, operations=(both(0, 1), Weigh((1, 3)), Backward()), batch_norm=True
    ),
    "own writes": Case(**TWO, operations=(both(0, 1), Backward()), writes="own"),
    "own writes, and a second gradient before ranks are compared": Case(
        **TWO,
        operations=(both(0, 1), Backward(outputs="first", keep=True), Backward()),
        writes="own",
    ),
    **{
        f"a local step before ranks are compared, {kind}": Case(
            **TWO, operations=(*LOCAL_STEP, both(0, 1), Backward()), writes=writes, **options
        )
        for kind, writes, options in (
            ("plain", "alike", {}),
            ("unused", "alike", {"find_unused_parameters": True}),
            ("static", "alike", {"static_graph": True}),
            ("wrapped", "own", {"static_graph": True, "wrapped": True}),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_on_every_rank(ranks, name):
    assert check(ranks("gloo", 2), REFUSED[name])["raised"]


def test_a_difference_is_told_with_its_program(ranks, monkeypatch):
    """The oracle is made to average wrongly."""
    monkeypatch.setattr("tests.support.fuzz_oracle.Oracle._average", lambda self, indices: None)
    case = Case(**TWO, operations=(both(0, 1), Backward()))
    with pytest.raises(
        AssertionError, match=r"gradients\[0\](.|\n)*in one process(.|\n)*1: Backward"
    ):
        check(ranks("gloo", 2), case)
