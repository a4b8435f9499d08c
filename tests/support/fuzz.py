"""Random training programs on real ranks, beside one process and beside torch's class.

    python -m tests.support.fuzz --cases 500 --seed 1 --backend gloo

hypothesis makes the programs (`fuzz_case.py`). Each is played on the ranks by a `Reducer` or a
`DistributedDataParallel`, and in one process (`fuzz_oracle.py`), which knows the gradients,
parameters and buffers after each operation, or the error that must be raised; and where torch's
DistributedDataParallel is right, by that, too: gradients must have the same bits with two ranks.
Where one process has the same numbers on all ranks, so must the ranks, to the bit. After an error
that all ranks raise, they must train on with a new Reducer.

tests/core/test_table.py has programs that are chosen by hand, with the same oracle.
A failure is shrunk to a program of a few lines, which is printed; exit code 1.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from tests.support.fuzz_case import (
    HOOKS,
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
    Move,
    Parameter,
    Played,
    Second,
    Set,
    Step,
    Transform,
    Weigh,
    Zero,
    play,
)
from tests.support.fuzz_oracle import Expected, Oracle
from tests.support.ranks import Crew
from tests.support.terms import BYTES

CALL_LIMIT_S = 20.0
SIMULATED = ["legacy", "nccl2"]  # rules by which NCCL waits


def check(crew: Crew, case: Case) -> Counter[str]:
    """Plays a case on a crew's ranks; what was compared. Raises what is not as in one process.

    A real GPU rounds differently from the CPU, but its bits must be those of torch's class.
    """
    oracle = Oracle(case)
    oracle.as_torch &= crew.backend not in SIMULATED
    try:
        results = crew(play, oracle.case, oracle.as_torch, oracle.together, limit=CALL_LIMIT_S)
        ours = [ours for ours, _ in results]
        # Before an error, gradients may be under way that the program reads or adds to.
        wrong = any(each.states is None for each in oracle.expected)
        for rank, played in enumerate(ours):
            assert wrong or not played.faults, f"on rank {rank}: {played.faults}"
        seen = Counter({"cases": 1, "operations": len(oracle.expected)})
        # A simulated GPU has the bits of a CPU, except in `ddp.SGD`, its fused kernel.
        rounds = crew.backend == "nccl" or (crew.backend in SIMULATED and case.flat)
        exact = len(ours) == 2 and not case.batch_norm and not rounds
        # A norm is summed in another order, which only shows in float64.
        rounding = 1e-12 * oracle.case.clips
        seen["raised"] = _compare(oracle, ours, rounding if exact else oracle.tolerance)
        if oracle.as_torch:
            seen["beside torch"] = 1
            _compare_with_torch(oracle, ours, [theirs for _, theirs in results], rounding)
    except AssertionError as error:
        raise AssertionError(f"{error}\nin the program\n{oracle.case}") from None
    return seen


def _compare(oracle: Oracle, ranks: list[Played], tolerance: float) -> bool:
    """Whether the case ended with an error, as it must or may."""
    for number, expected in enumerate(oracle.expected):
        told = {r: p.error for r, p in enumerate(ranks) if p.error and len(p.states) == number}
        _compare_errors(f"operation {number}: ", expected, told, len(ranks))
        if told and not expected.must:
            break
        if expected.states is not None:
            _compare_states(number, expected.states, [p.states[number] for p in ranks], tolerance)
    ended = any(played.error for played in ranks)
    if ended and oracle.together:
        assert all(played.recovered for played in ranks), "ranks do not train on after the error"
    return ended


def _compare_errors(what: str, expected: Expected, told: dict[int, str], ranks: int) -> None:
    for rank, pattern in expected.must.items():
        assert rank in told, f"{what}rank {rank} raises nothing, not {pattern!r}"
    for rank, error in told.items():
        pattern = expected.must.get(rank, expected.may)
        right = pattern is not None and re.search(pattern.format(rank=rank), error, re.DOTALL)
        assert right, f"{what}rank {rank} raises {error}, not {pattern!r}"
    if told and not expected.must:
        assert len(told) == ranks, f"{what}only some raise: {told}"


def _compare_states(number: int, expected: list[Any], found: list[Any], tolerance: float) -> None:
    for rank, (state, right) in enumerate(zip(found, expected, strict=True)):
        for what, *values in _values(state, right, found[0], expected[0]):
            value, correct, first, correct_first = values
            where = f"operation {number}: {what} on rank {rank} is"
            assert _near(value, correct, tolerance), (
                f"{where}\n{value}\nand in one process\n{correct}"
            )
            same = _near(correct, correct_first, 0)
            assert not same or _near(value, first, 0), f"{where}\n{value}\nand on rank 0\n{first}"


def _compare_with_torch(
    oracle: Oracle, ours: list[Played], torchs: list[Played], rounding: float
) -> None:
    tolerance = rounding if len(ours) == 2 else oracle.tolerance
    for rank, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        assert theirs.error is None, f"torch's class raises on rank {rank}: {theirs.error}"
        for number, states in enumerate(zip(mine.states, theirs.states, strict=True)):
            # Buffers are all ranks' after an average, with torch's class before the next forward.
            late = rank and not isinstance(oracle.case.operations[number], Forward)
            for what, value, correct in _values(*states, kinds=KINDS[: 2 if late else 3]):
                assert _near(value, correct, tolerance), (
                    f"operation {number}: {what} on rank {rank} is\n{value}\nand with torch's "
                    f"class\n{correct}"
                )


KINDS = ("gradients", "parameters", "buffers")


def _values(*states: dict[str, list[Any]], kinds: Sequence[str] = KINDS) -> Any:
    for kind in kinds:
        for index, values in enumerate(zip(*(state[kind] for state in states), strict=True)):
            yield f"{kind}[{index}]", *values


def _near(value: Any, correct: Any, tolerance: float) -> bool:
    if value is None or correct is None:
        return value is correct
    if value.shape != correct.shape:  # a buffer that has grown on one rank
        return False
    return bool((np.abs(value - correct) <= tolerance).all())


CAPS: list[Any] = [None, 0, 20 * BYTES, 80 * BYTES, (12 * BYTES, 100 * BYTES), float("inf")]


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    """Programs of a model, settings and blocks of operations."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def once_in(count: int) -> bool:
        return draw(st.integers(0, count - 1)) == 0

    kind = one_of("plain", "unused", "static")
    dtypes = one_of(["float32"], ["float32", "float64"], ["bfloat16", "float32"])
    parameter = st.builds(Parameter, st.integers(1, 4), st.sampled_from(dtypes))
    parameters = draw(st.lists(parameter, min_size=1, max_size=5))
    if once_in(10) and len(parameters) > 1:
        parameters[-1] = replace(parameters[-1], frozen=True)
    special = one_of(*[None] * 4, ("complex64", "conjugated"), ("bfloat16", "precise"))
    if special is not None:
        place = draw(st.integers(0, len(parameters) - 1))
        parameters[place] = replace(parameters[place], dtype=special[0], kind=special[1])
    branch = st.lists(st.integers(0, len(parameters) - 1), min_size=1, max_size=3)
    branches = draw(st.lists(branch, min_size=1, max_size=3))
    if kind == "plain" and not once_in(10):  # else a forgotten parameter
        branches[-1] += sorted(set(range(len(parameters))) - {i for b in branches for i in b})
    # Ranks that differ below a batch norm: nothing else may hide an order of collectives.
    below = kind == "unused" and once_in(5)
    if below:
        branches.append([0])
    every = tuple(range(len(branches)))
    some = st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True).map(tuple)
    uses = st.tuples(*[some] * world_size)
    # Programs that are not as every pass must be are most often a matter of one error.
    usual = (every,) * world_size if kind == "plain" else draw(uses)
    regular = kind != "unused" and not once_in(5)
    batch_norm = below or (regular and once_in(4))
    block = _block(st.just(usual) if regular else uses, regular, len(parameters), world_size)
    operations = tuple(op for ops in draw(st.lists(block, min_size=1, max_size=6)) for op in ops)
    writes = None if batch_norm else one_of(*[None] * 8, "own", "equal")
    flat, shared_memory, wrapped = draw(st.booleans()), not once_in(4), draw(st.booleans())
    halves = (
        not (wrapped or flat or batch_norm or writes or any(p.frozen for p in parameters))
        and len(parameters) > 1
        and (kind == "unused" or (kind == "static" and regular))
        and not any(isinstance(op, Freeze | Join | Second) for op in operations)
        # With a loss in parts, ranks may disagree on which Reducers a pass goes through.
        and not any(isinstance(op, Backward) and op.outputs != "all" for op in operations)
    )
    hook = None if below else one_of(None, None, *HOOKS)
    reduce = "mean" if hook or once_in(2) else "sum"
    if reduce == "sum":
        operations = tuple(with_all_ranks(op) for op in operations)
    # All ranks step in the same way, as Muon and shards need.
    in_step = flat and regular and writes is None and steps_with_averages(operations, wrapped)
    in_step = in_step and special is None
    muon = in_step and once_in(3)
    can_divide = in_step and not muon and "bfloat16" not in dtypes
    shard = one_of("none", *["world", *["node"] * shared_memory] * can_divide)
    # An error of this kind ends a group of ranks.
    one_sets = any(isinstance(op, Set) and op.rank is not None for op in operations)
    fails = (muon or shard != "none") and one_sets
    switches = ["gradient_as_bucket_view", "fuse_wgrad", "large", "sync_buffers"]
    switches.append("check_finite")
    return Case(
        world_size=world_size,
        parameters=tuple(parameters),
        branches=tuple(map(tuple, branches)),
        operations=operations,
        buffers=not batch_norm and draw(st.booleans()),
        wrapped=wrapped,
        bucket_cap_mb=one_of(*(CAPS[1:4] if below else CAPS)),
        overlap=below or draw(st.booleans()),
        find_unused_parameters=kind == "unused" or (kind == "static" and draw(st.booleans())),
        static_graph=kind == "static",
        divided=fails or (kind == "plain" and not regular and once_in(4)),
        hook=hook,
        reduce=reduce,
        checkpoint=one_of(None, None, "not reentrant", *["reentrant"] * regular),
        batch_norm=batch_norm,
        optimizer="Muon" if muon else one_of("SGD", "SGD", *["AdamW"] * (special is None)),
        flat=flat,
        shard=shard,
        shared_memory=shared_memory,
        halves=halves and draw(st.booleans()),
        momentum=one_of(0.0, 0.9 * muon, 0.9),
        writes=writes,
        seed=draw(st.integers(0, 99)),
        **{name: draw(st.booleans()) for name in switches},
    )


def with_all_ranks(op: Any) -> Any:
    """The same operation; a `Join` divides by all ranks, as a sum's must."""
    return replace(op, initial=True) if isinstance(op, Join) else op


def steps_with_averages(operations: tuple[Any, ...], wrapped: bool = False) -> bool:
    """Whether all ranks step in the same way, with averages."""
    local = forward_is_local = False
    for op in operations:
        if isinstance(op, Forward):
            forward_is_local = wrapped and op.no_sync
        if isinstance(op, Join | Move) or (local and isinstance(op, Step)):
            return False
        if forward_is_local and isinstance(op, BackwardAndStep):
            return False
        if isinstance(op, Freeze) and (op.parameter is not None or op.rank is not None):
            return False
        if isinstance(op, Backward | BackwardAndStep | Zero | Average | Differentiate):
            local = isinstance(op, Differentiate)
            local = local or (isinstance(op, Backward) and (op.no_sync or forward_is_local))
    return True


def _block(use: Any, regular: bool, count: int, world_size: int) -> Any:
    """What programs do, as lists of operations; in irregular ones anything at all."""

    def after_each_other(*parts: Any) -> Any:
        """Of operations, of strategies for them, and for lists of them."""
        each = (part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts)
        lists = (strategy.map(lambda p: p if isinstance(p, list) else [p]) for strategy in each)
        return st.tuples(*lists).map(lambda found: list(chain(*found)))

    rank, per_rank = st.integers(0, world_size - 1), st.tuples(*[st.integers(0, 3)] * world_size)
    indices = st.lists(st.integers(0, count - 1), max_size=2).map(tuple)
    absent = st.one_of(*[st.just(())] * 4, st.tuples(*[indices] * world_size))
    forward, some = st.builds(Forward, use, st.just(False), absent), per_rank.filter(any)
    weigh = st.builds(Weigh, some)
    end = st.booleans().map(lambda to_none: [Step(), Zero(to_none)])
    norms = st.sampled_from([None, 0.1, 1.0, 100.0])
    at_once = after_each_other(st.builds(BackwardAndStep, norms), st.just(Zero()))
    inside = st.builds(Forward, use, st.just(True), absent)
    locally = after_each_other(inside, Backward(no_sync=True))
    accumulated = st.lists(locally, max_size=2).map(lambda pairs: list(chain(*pairs)))
    several = [
        [Backward((0, 1))],
        [Backward((1,)), Backward((0,))],
        [Backward((0,)), Backward((0,))],
        [Backward((1,), no_sync=True), Backward((0,))],
    ]
    again = [
        [Backward(keep=True), Backward()],
        [Backward(keep=True, no_sync=True), Backward()],
        [Backward(keep=True), Backward(no_sync=True)],
    ]
    blocks = [
        after_each_other(accumulated, forward, Backward(), end),
        after_each_other(forward, Backward(), end),
        after_each_other(forward, at_once),
        after_each_other(accumulated, weigh, forward, st.builds(BackwardAndStep, norms)),
        after_each_other(forward, forward, st.sampled_from(several), end),
        after_each_other(forward, st.sampled_from(again), end),
        after_each_other(weigh, forward, Backward(), end),
        after_each_other(st.builds(Evaluate, rank)),
        after_each_other(st.builds(Transform, rank)),
        st.sampled_from([[Move()], [Again()], [Again(removes=False)], [Freeze(None, False)]]),
        after_each_other(inside, Backward(), end),
        after_each_other(forward, Differentiate(), Average(), end),
        after_each_other(accumulated, Average(), end),
        after_each_other(Freeze(None), forward, end, Freeze(None, False)),
        st.builds(Second, st.integers(0, 1)).map(lambda op: [op]),
        after_each_other(st.builds(Grow, st.one_of(st.none(), st.none(), rank))),
        after_each_other(st.builds(Set, st.sampled_from([0.5, 2.0]), st.one_of(st.none(), rank))),
        # What another Reducer has accumulated, and a pass that may not use it.
        after_each_other(accumulated, Again(), forward, Backward(), end),
        after_each_other(st.builds(Join, some, st.booleans())),
    ]
    if not regular:
        first, rest = Backward(outputs="first", keep=True), Backward(outputs="rest")
        parts = [[first, rest], [replace(first, no_sync=True), rest], [replace(first, keep=False)]]
        back = st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True).map(tuple)
        outputs = st.sampled_from(["all", "first", "rest"])
        backward = st.builds(Backward, back, outputs, st.booleans(), st.booleans())
        odd = st.sampled_from([Average(), Differentiate()])
        anything = st.one_of(forward, inside, backward, st.builds(Zero, st.booleans()), weigh, odd)
        whose = st.one_of(st.none(), rank)
        blocks += [
            after_each_other(forward, st.sampled_from(parts), end),
            after_each_other(st.builds(Freeze, st.integers(0, count - 1), st.booleans(), whose)),
            after_each_other(st.builds(Freeze, st.none(), st.booleans(), whose)),
            st.lists(anything, min_size=1, max_size=4),
        ]
    return st.one_of(*blocks)


def gpu_cases(world_size: int) -> Any:
    """Without what is refused on a GPU, and without ranks that do not meet: a launch waits here.

    And without Muon: a GPU's products of bfloat16 are too far from those of one process.
    """

    def on_gpu(case: Case) -> Case:
        shard = "world" if case.shard == "node" else case.shard
        optimizer = "SGD" if case.optimizer == "Muon" else case.optimizer
        options = {"fuse_wgrad": False, "divided": False, "shard": shard, "optimizer": optimizer}

        # Settings of one rank are not compared, and buffers not at once.
        def compared(op: Any) -> bool:
            return not (isinstance(op, Grow) or (isinstance(op, Set) and op.rank is not None))

        # The simulated device does not resolve lazy conjugates.
        parameters = tuple(
            replace(p, kind="matrix") if p.kind == "conjugated" else p for p in case.parameters
        )
        operations = tuple(filter(compared, case.operations))
        return replace(case, **options, parameters=parameters, operations=operations)

    return cases(world_size).map(on_gpu)


def run(
    check_case: Callable[[Case], Counter[str]], strategy: Any, count: int, seed: int
) -> Counter[str]:
    """Checks `count` random cases; what was compared. Raises for the smallest case that fails."""
    total: Counter[str] = Counter()
    found: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def fuzz(case: Case) -> None:
        try:
            total.update(check_case(case))
        except AssertionError as error:
            if not found:
                found.append(case)
                print(f"after {total['cases']} cases, to be shrunk: {error}", file=sys.stderr)
            raise

    fuzz()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["gloo", "mpi", "nccl", *SIMULATED], default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    crews: list[Crew] = []

    def check_one(case: Case) -> Any:
        if not crews or crews[-1].ended:
            crews.append(Crew(args.backend, args.ranks))
        return check(crews[-1], case)

    strategy = gpu_cases if args.backend in ["nccl", *SIMULATED] else cases
    try:
        total = run(check_one, strategy(args.ranks), args.cases, args.seed)
    except AssertionError as error:
        sys.exit(str(error))
    finally:
        for crew in crews:
            crew.end()
    print(", ".join(f"{count} {what}" for what, count in total.items()), "- no mismatch")


if __name__ == "__main__":
    main()
