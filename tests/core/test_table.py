"""Programs, each with every option and on each backend, compared with `fuzz_oracle.py`."""

import math
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest

from tests.support.fuzz import check, steps_with_averages, with_all_ranks
from tests.support.fuzz_case import (
    Again,
    Average,
    Backward,
    BackwardAndStep,
    Case,
    Differentiate,
    Evaluate,
    Forward,
    Freeze,
    Grow,
    Join,
    KeepViews,
    Move,
    Parameter,
    Second,
    Set,
    Step,
    Transform,
    Weigh,
    Zero,
)
from tests.support.terms import BYTES
from tests.support.tiers import spread


def all_use(*branches: int, no_sync: bool = False) -> Forward:
    return Forward((branches,), no_sync)


def without(*absent: tuple[int, ...]) -> Forward:
    """With undefined gradients of these parameters, on each rank."""
    return Forward(((0, 1),), absent=absent)


def program(*operations: Any, **settings: Any) -> Case:
    settings = {"parameters": (Parameter(2), Parameter(3), Parameter(1))} | settings
    settings = {"branches": ((0, 1), (2,))} | settings
    return Case(0, operations=operations, **settings)


def on_ranks(case: Case, size: int) -> Case:
    def each(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(islice(cycle(values), size))

    operations = []
    for op in case.operations:
        if isinstance(op, Forward):
            op = replace(op, use=each(op.use), absent=each(op.absent))
        elif isinstance(op, Weigh):
            op = replace(op, amounts=each(op.amounts))
        elif isinstance(op, Join):
            op = replace(op, batches=each(op.batches))
        operations.append(op)
    return replace(case, world_size=size, operations=tuple(operations))


ALL = all_use(0, 1)
LOCAL = (all_use(0, 1, no_sync=True), Backward(no_sync=True))
PART = (all_use(0, no_sync=True), Backward(no_sync=True))
END = (Backward(), Step(), Zero())
STEP = (ALL, *END)
OTHERS = Forward(((0,), (1,)))  # each rank its own
SOME_USE_BOTH = Forward(((0, 1), (1,)))
ONE_BY_ONE = {"find_unused_parameters": True, "bucket_cap_mb": 0}
UNUSED = {
    "parameters": (*map(Parameter, (2, 3, 1, 4)), Parameter(2)),  # the last is in no branch
    "branches": ((0, 1), (1, 2), (3,)),
    "find_unused_parameters": True,
}
STATIC = UNUSED | {"find_unused_parameters": False, "static_graph": True}
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
FROZEN = (Parameter(2), Parameter(3, frozen=True), Parameter(1))
EMPTY = (Parameter(2), Parameter(0, kind="transposed"), Parameter(1))
KINDS = ("conv", "holes", "transposed", "scalar", "matrix", "conv")
PROGRAMS = {
    "plain": program(*STEP, *STEP, *STEP, momentum=0.9),
    "AdamW": program(*STEP, *STEP, optimizer="AdamW"),
    "Muon": program(*STEP, *LOCAL, *STEP, *STEP, optimizer="Muon", flat=True, momentum=0.9),
    "accumulated": program(*LOCAL, *LOCAL, *STEP[:3], Zero(False), *LOCAL, *STEP),
    "never zero": program(*STEP[:3], *STEP[:3], *STEP),
    "accumulated in part": program(*STEP, *PART, *STEP),
    "another order": program(*STEP, *STEP, all_use(1, 0), *END, *STEP),
    "another order on a rank": program(*STEP, *STEP, Forward(((1, 0), (0, 1))), *END, *STEP),
    "forward in no_sync alone": program(all_use(0, 1, no_sync=True), Backward(), *STEP),
    "two forwards, a backward": program(ALL, ALL, Backward((0, 1)), Step(), Zero(), *STEP),
    "two forwards, two backwards": program(ALL, ALL, Backward((1,)), Backward(), Step()),
    "a graph twice": program(ALL, Backward(keep=True), *END, *STEP),
    "a graph twice, at first locally": program(ALL, Backward(keep=True, no_sync=True), *END, *STEP),
    "a loss in parts": program(
        *((ALL, Backward(outputs="first", keep=True), Backward(outputs="rest"), Step(), Zero()) * 2)
    ),
    "tied": program(*STEP, *STEP, branches=((0, 1, 0), (2, 1))),
    "of no elements": program(*STEP, *LOCAL, *STEP, parameters=EMPTY),
    "frozen": program(*STEP, *STEP, parameters=FROZEN),
    "dtypes": program(
        *(*STEP, *LOCAL, *STEP),
        parameters=tuple(Parameter(1 + i % 3, dtype) for i, dtype in enumerate(2 * DTYPES)),
        branches=(tuple(range(5)), tuple(range(5, 10))),
    ),
    "a lazy conjugate, a gradient of another dtype": program(
        *(*STEP, *LOCAL, *STEP, ALL, Backward(keep=True), *END),
        parameters=(
            *(Parameter(2, "complex64", kind="conjugated"), Parameter(3)),
            *(Parameter(1, "bfloat16", kind="precise"), Parameter(2, "bfloat16")),
        ),
        branches=((0, 1), (2, 3)),
        momentum=0.9,
    ),
    "undefined gradients": program(
        *(*STEP, without((0,)), *END, without((), (0, 2)), *END, *LOCAL, without((0, 1, 2)), *END),
        *(without((1,), (2,)), Backward(no_sync=True), *STEP),
    ),
    "undefined gradients, unused": program(
        *(*STEP, without((0,)), *END, without((), (0, 2)), *END, *LOCAL, without((0, 1, 2)), *END),
        *(without((1,), (2,)), Backward(no_sync=True), OTHERS, *END),
        **UNUSED,
    ),
    "undefined gradients, static": program(
        *(*STEP, without((0,)), *END, without((), (0, 2)), *END, *LOCAL, without((0, 1, 2)), *END),
        **STATIC,
    ),
    "autograd.grad, then averaged": program(
        *(ALL, Differentiate(), Average(), Step(), Zero()) * 2,
        *(*STEP, *LOCAL, ALL, Differentiate(), Average(), Step(), Zero(), *STEP),
    ),
    "averaged after local passes": program(
        *(*LOCAL, Average(), Step(), Zero(), *LOCAL, *LOCAL, Average(), Step(), Zero(), *STEP)
    ),
    "averaged without a pass, unused": program(
        *(OTHERS, Differentiate(), Average(), Step(), Zero(), OTHERS, *END),
        *(OTHERS, Backward(no_sync=True), Average(), *STEP),
        **UNUSED,
    ),
    "averaged without a pass, static": program(*STEP, *LOCAL, Average(), Step(), *STEP, **STATIC),
    "another learning rate": program(*STEP, Set(0.5), *STEP, Again(), *STEP, momentum=0.9),
    "a learning rate of one rank": program(*STEP, Set(0.5, 0), *STEP, Set(0.5, 1), *STEP),
    "all frozen for a while": program(
        *(*STEP, Freeze(None), ALL, Step(), Freeze(None, False), *STEP),
        *(*LOCAL, Freeze(None), ALL, Freeze(None, False), *STEP),
    ),
    "all frozen for a while, unused": program(
        *(OTHERS, *END, Freeze(None), ALL, Freeze(None, False), OTHERS, *END), **UNUSED
    ),
    "a buffer grows": program(
        *(*STEP, Grow(), *STEP, *LOCAL, Grow(), *LOCAL, *STEP),
        buffers=True,
        sync_buffers=True,
    ),
    "a Reducer of a part, too": program(
        *(*STEP, Second(0), *STEP, *LOCAL, *STEP[:3], Zero(False), *STEP, Again(), *STEP)
    ),
    "a Reducer left behind": program(
        *(*STEP, *LOCAL, Again(removes=False), *STEP, *STEP), momentum=0.9
    ),
    "layouts": program(
        *(*STEP, *LOCAL, *STEP),
        parameters=tuple(Parameter(2, kind=kind) for kind in KINDS),
        branches=((0, 1, 2), (3, 4, 5)),
    ),
    "sparse": program(
        *(*STEP, *LOCAL, *STEP, ALL, Backward(keep=True), Backward(), Weigh((1, 3)), *STEP),
        *(*STEP, Join((3, 1)), Join((0, 1), initial=False)),
        parameters=(Parameter(5, kind="table"), Parameter(3), Parameter(4, kind="table")),
        branches=((0, 1), (2,)),
    ),
    "sparse, momentum": program(
        *(ALL, Backward(keep=True), *END, *STEP, *STEP),
        parameters=(Parameter(5, kind="table"), Parameter(3)),
        branches=((0,), (1,)),
        momentum=0.9,
    ),
    "unused, other ones on each rank": program(
        *(OTHERS, *END, all_use(2), Backward(), Step(), Zero(False)),
        *(OTHERS, Backward(no_sync=True), all_use(2), *END, *STEP),
        *(OTHERS, Backward(keep=True), Backward(), OTHERS, Backward()),
        **UNUSED,
    ),
    "unused, several forwards": program(
        *(all_use(0), OTHERS, Backward((0, 1)), Step(), Zero()),
        *(all_use(0), OTHERS, Backward((1,)), *END),
        *(all_use(0, 2), Backward(outputs="rest"), all_use(1), Backward(), Step()),
        **UNUSED,
    ),
    "unused tables": program(
        *(OTHERS, *END, all_use(1), Backward(), Step()),
        parameters=(Parameter(3, kind="table"), Parameter(4, kind="table"), Parameter(2)),
        branches=((0,), (1,), (2,)),
        find_unused_parameters=True,
    ),
    "frozen for a while": program(
        *(*STEP, Freeze(1), *STEP, Freeze(1, False, 0), *STEP, Freeze(1, False), *STEP), **UNUSED
    ),
    "static, unused": program(
        *(OTHERS, *END, OTHERS, Backward(no_sync=True), OTHERS, *END, OTHERS, Backward(), Step()),
        **STATIC,
    ),
    "checkpointed": program(*STEP, *LOCAL, *STEP, checkpoint="not reentrant"),
    "checkpointed, reentrant": program(*STEP, *LOCAL, *STEP, checkpoint="reentrant"),
    "checkpointed, reentrant, shared": program(
        *(*STEP, *LOCAL, *STEP, *STEP), checkpoint="reentrant", **STATIC
    ),
    "checkpointed, unused": program(
        *(OTHERS, *END, all_use(2, 0), Backward(), Step()), checkpoint="reentrant", **UNUSED
    ),
    "autocast": program(*STEP, *LOCAL, *STEP, autocast=True),
    "weighed": program(ALL, Weigh((1, 3)), *END, *STEP, Weigh((0, 2)), *STEP),
    "join": program(
        *(*STEP, Join((1, 3)), *STEP, Join((2, 0), initial=False), *STEP, Join((0, 2)), *STEP),
        buffers=True,
        sync_buffers=True,
    ),
    "join, unused": program(Join((1, 3)), OTHERS, *END, **UNUSED),
    "buffers": program(*STEP, Evaluate(0), *LOCAL, *STEP, buffers=True, sync_buffers=True),
    "batch norm": program(*STEP, Evaluate(1), *LOCAL, Weigh((2, 2)), *STEP, batch_norm=True),
    "moved": program(*STEP, ALL, Backward(), Move(), Step(), *LOCAL, Move(), *STEP, Zero(), *STEP),
    **{
        f"moved, {how}": program(
            *(*STEP, *STEP[:3], Zero(False), Move(how), *STEP, *LOCAL, Move(how), *STEP, *STEP),
            optimizer="AdamW",
        )
        for how in ("half", "data", "detached")
    },
    "moved on a rank": program(
        *(*STEP, Move("contiguous", rank=0), *STEP, *LOCAL, *STEP),
        parameters=tuple(Parameter(2, kind="conv") for _ in range(3)),
    ),
    "moved on a rank, at first": program(
        *(Move("contiguous", rank=0), *STEP, *STEP),
        parameters=tuple(Parameter(2, kind="conv") for _ in range(3)),
    ),
    "views from now on": program(
        *(KeepViews(), *LOCAL, *STEP, *LOCAL, KeepViews(), ALL, Backward(), KeepViews(), *STEP)
    ),
    "another Reducer": program(
        *(*STEP, *LOCAL, Again(), ALL, *END, *STEP, Again(), *STEP), optimizer="AdamW"
    ),
    "transformed on a rank": program(Transform(0), *STEP, Transform(1), *STEP),
    "transformed, unused": program(
        *(Transform(0), OTHERS, *END, Transform(1), OTHERS, Backward()), **UNUSED
    ),
    "written in forward": program(*STEP, *STEP, writes="equal"),
    # What random programs have found.
    "join, then buffers": program(*(Join((1, 2)), *STEP, *STEP), buffers=True, sync_buffers=True),
    "join, then weights": program(
        *(Join((1, 2)), Weigh((1, 3)), *STEP), buffers=True, sync_buffers=True
    ),
    "batch norm, a branch below it on some ranks": program(
        *(SOME_USE_BOTH, Backward(), Zero(), *STEP), batch_norm=True, **ONE_BY_ONE
    ),
    "batch norm, a branch below it always on the same ranks": program(
        *((SOME_USE_BOTH, *END) * 3),
        batch_norm=True,
        checkpoint="not reentrant",
        **ONE_BY_ONE | {"find_unused_parameters": False, "static_graph": True},
    ),
    "checkpointed, a graph twice": program(
        *(*LOCAL, *STEP, ALL, Backward(keep=True), Backward(), Step()), checkpoint="not reentrant"
    ),
    "another Reducer, a parameter that it never saw": program(
        *(*LOCAL, Again(), all_use(1), Backward(), Step()), find_unused_parameters=True
    ),
    "transformed, static": program(
        *(ALL, Backward(), Zero(), Transform(0), *STEP), static_graph=True
    ),
    "error: own writes, then a second gradient": program(
        *(ALL, Backward(outputs="first", keep=True), Backward()), writes="own"
    ),
    "error: own writes, static, after a local step": program(
        *(*LOCAL, Step(), Zero(), ALL, Backward()), writes="own", static_graph=True
    ),
    "error: a rank without a gradient waits for buffers": program(
        *(*STEP, SOME_USE_BOTH, Backward()), buffers=True, sync_buffers=True, divided=True
    ),
    "error: a rank without a gradient steps at once": program(
        *(*STEP, SOME_USE_BOTH, BackwardAndStep(1.0)), flat=True, divided=True
    ),
    # That all ranks raise the same error, and train on with a new Reducer.
    "error: written in forward": program(*STEP, writes="own"),
    "error: a parameter forgotten": program(*STEP, all_use(0), Backward(), ALL),
    "error: a step with one forgotten": program(*STEP, all_use(1), Backward(), Step()),
    "error: weighed, batch norm": program(*STEP, Weigh((1, 3)), *STEP, batch_norm=True),
    "error: a buffer of one rank grows": program(
        *(*STEP, Grow(1), *STEP), buffers=True, sync_buffers=True
    ),
    "error: a buffer of one rank grows, averaged without a pass": program(
        *(*STEP, Grow(1), *LOCAL, Average()), buffers=True, sync_buffers=True
    ),
    "error: averaged without a gradient": program(*STEP, Average()),
    "error: averaged without a pass, not static": program(
        *(OTHERS, *END, all_use(2, no_sync=True), Backward(no_sync=True), Average()), **STATIC
    ),
    "error: frozen later": program(*STEP, Freeze(1), ALL),
    "error: thawed later": program(*STEP, Freeze(1, False), ALL, parameters=FROZEN),
    "error: not static": program(all_use(0, 1), *END, all_use(0, 2), Backward(), **STATIC),
    "error: not static under no_sync": program(
        *(all_use(0), *END, all_use(2, no_sync=True), Backward(no_sync=True)),
        *(all_use(0), Backward()),
        **STATIC,
    ),
    "error: not static on each rank otherwise": program(
        *(all_use(0), Backward(), Zero(), Forward(((0, 1), (2,))), Backward()), **STATIC
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "a bucket each": {"bucket_cap_mb": 0},
    "two buckets": {"bucket_cap_mb": (12 * BYTES, math.inf)},
    "at the end, checked": {"bucket_cap_mb": 0, "overlap": False, "check_finite": True},
    "views": {"bucket_cap_mb": 40 * BYTES, "gradient_as_bucket_view": True},
    "views of large": {"gradient_as_bucket_view": True, "large": True, "bucket_cap_mb": 40 * BYTES},
    "fused": {"fuse_wgrad": True, "large": True},
    "fused, flat": {"fuse_wgrad": True, "large": True, "flat": True, "bucket_cap_mb": 0},
    "wrapped": {"wrapped": True, "bucket_cap_mb": math.inf},
    "a hook of two": {"hook": "in_halves", "bucket_cap_mb": 0},
    "a hook with a tensor of its own": {"hook": "gathered", "gradient_as_bucket_view": True},
    "gloo alone": {"shared_memory": False, "bucket_cap_mb": 40 * BYTES},
    "flat": {"flat": True, "gradient_as_bucket_view": True},
    "flat, in one": {"flat": True, "bucket_cap_mb": 40 * BYTES},
    "summed, wrapped": {"reduce": "sum", "wrapped": True, "large": True, "fuse_wgrad": True},
    "summed, flat, in one": {"reduce": "sum", "flat": True},
    "summed, divided on a node, in one": {"reduce": "sum", "flat": True, "shard": "node"},
    "summed, divided, in one": {"reduce": "sum", "flat": True, "shard": "world"},
    "divided on a node": {"flat": True, "shard": "node", "bucket_cap_mb": 40 * BYTES},
    "divided on a node, in one": {"flat": True, "shard": "node"},
    "divided": {"flat": True, "shard": "world", "bucket_cap_mb": 40 * BYTES},
    "divided, in one": {"flat": True, "shard": "world"},
}
BACKENDS = ["gloo-2", "mpi-2", "gloo-3", "node-3"]


def in_one(operations: tuple[Any, ...]) -> tuple[Any, ...]:
    whole: list[Any] = []
    for op in operations:
        if isinstance(op, Step) and whole and whole[-1] == Backward():
            whole[-1] = BackwardAndStep()
        else:
            whole.append(op)
    return tuple(whole)


def with_option(name: str, option: str) -> Case:
    case = replace(PROGRAMS[name], **OPTIONS[option])
    if case.reduce == "sum":
        case = replace(case, operations=tuple(map(with_all_ranks, case.operations)))
    return replace(case, operations=in_one(case.operations)) if "in one" in option else case


def fits(name: str, option: str) -> bool:
    """Whether one more Reducer is possible, and whether the ranks can divide the step."""
    case = with_option(name, option)
    has_second = any(isinstance(op, Second) for op in case.operations)
    if (has_second and case.reduce == "sum") or (
        case.wrapped and (has_second or Again(removes=False) in case.operations)
    ):
        return False
    kinds = ("holes", "conjugated", "precise")
    movable = all(
        p.dtype in ("float32", "float64") and p.kind not in kinds for p in case.parameters
    )
    same = case.writes is None and steps_with_averages(case.operations, case.wrapped)
    same = same and not any(isinstance(op, Set) and op.rank is not None for op in case.operations)
    return case.shard == "none" or (movable and same and case.optimizer != "Muon")


@pytest.mark.parametrize(
    ("name", "option", "backend"),
    [
        case
        for case in spread(PROGRAMS, OPTIONS, BACKENDS)
        if fits(*getattr(case, "values", case)[:2])
    ],
)
def test_program(ranks, name, option, backend):
    group, size = backend.split("-")
    case = on_ranks(with_option(name, option), int(size))
    seen = check(ranks(group, int(size)), case)
    assert seen["raised"] == name.startswith("error: ")
    assert seen["raised"] or seen["operations"] == len(case.operations)
