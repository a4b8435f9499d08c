"""Random training programs on real ranks, beside one process and beside torch's class.

    python -m tests.support.fuzz --cases 500 --seed 1 --backend gloo

hypothesis makes the programs (`fuzz_case.py`): models with branches, shared and unused parameters,
several dtypes, outputs and buffers, activation checkpointing, batch norm over all ranks;
accumulation, several forward passes for one backward and the other way round, retained graphs,
losses in parts, freezing, weights of ranks, unequal numbers of steps; comm hooks; flat optimizers;
parameters and gradients that are moved, Reducers that follow one another, transforms of torch.func,
forward passes that write to parameters; two Reducers for one module.
Each is played on the ranks by a
`Reducer` or a `DistributedDataParallel`, and in one process (`fuzz_oracle.py`), which knows the
gradients, parameters and buffers after each operation, or the error that must be raised; and where
torch's DistributedDataParallel is right, by that, too: gradients must have the same bits with two
ranks. Where one process has the same numbers on all ranks, so must the ranks, to the bit. After an
error that all ranks raise, they must train on with a new Reducer.

tests/reducer/test_table.py has programs that are chosen by hand, with the same oracle.

With `--shards V` programs are played on V shards, by one rank and by `--ranks` (`fuzz_shards.py`).

A failure is shrunk to a program of a few lines, which is printed; exit code 1.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import hypothesis
import numpy as np
from hypothesis import strategies as st

from tests.support.fuzz_case import (
    Again,
    Backward,
    Case,
    Evaluate,
    Forward,
    Freeze,
    Join,
    Move,
    Operation,
    Parameter,
    State,
    Step,
    Transform,
    Weigh,
    Zero,
)
from tests.support.fuzz_expected import Expected
from tests.support.fuzz_oracle import Oracle
from tests.support.fuzz_play import HOOKS, Played, play
from tests.support.fuzz_shards import check_shards, sharded_cases
from tests.support.ranks import Crew

CALL_LIMIT_S = 20.0


def check(crew: Crew, case: Case) -> Counter[str]:
    """Plays a case on a crew's ranks; what was compared.

    Raises:
        AssertionError: something is not as in one process, or as with torch's class.
    """
    oracle = Oracle(case)
    try:
        results = crew(play, oracle.case, oracle.as_torch, oracle.together, limit=CALL_LIMIT_S)
        ours = [ours for ours, _ in results]
        seen = Counter({"cases": 1, "operations": len(oracle.expected)})
        seen["raised"] = _compare(oracle, ours)
        if oracle.as_torch:
            seen["beside torch"] = 1
            _compare_with_torch(oracle, ours, [theirs for _, theirs in results])
    except AssertionError as error:
        raise AssertionError(f"{error}\nin the program\n{oracle.case}") from None
    return seen


def _compare(oracle: Oracle, ranks: list[Played]) -> bool:
    """Whether the case ended with an error, as it must or may."""
    for number, expected in enumerate(oracle.expected):
        errors = {
            rank: str(played.error)
            for rank, played in enumerate(ranks)
            if len(played.states) == number and played.error is not None
        }
        _compare_errors(number, expected, errors, len(ranks))
        if errors and not expected.must:
            break
        if expected.states is not None:
            _compare_states(oracle, number, expected.states, [p.states[number] for p in ranks])
    ended = [rank for rank, played in enumerate(ranks) if played.error is not None]
    if ended and oracle.together:
        assert all(played.recovered for played in ranks), "ranks do not train on after the error"
    return bool(ended)


def _compare_errors(
    number: int, expected: Expected, errors: dict[int, str], world_size: int
) -> None:
    for rank, (pattern, names) in expected.must.items():
        assert rank in errors, f"operation {number}: rank {rank} raises nothing, not {pattern!r}"
        told = errors[rank]
        assert re.search(pattern, told), f"operation {number}: rank {rank} raises {told}"
        assert all(name in told for name in names), f"operation {number}: {names} not in {told}"
    for rank, told in errors.items():
        may = any(re.search(pattern.format(rank=rank), told) for pattern in expected.may)
        assert rank in expected.must or may, f"operation {number}: rank {rank} raises {told}"
    if errors and not expected.must:
        assert len(errors) == world_size, f"operation {number}: only some raise: {errors}"


def _compare_states(oracle: Oracle, number: int, expected: list[State], ranks: list[State]) -> None:
    exact = len(ranks) == 2 and not oracle.case.batch_norm
    tolerance = 0.0 if exact else (0.05 if oracle.case.coarse else 1e-4) * max(1.0, oracle.largest)
    for kind in ("gradients", "parameters", "buffers"):
        rows = [getattr(state, kind) for state in expected]
        for index, values in enumerate(zip(*rows, strict=True)):
            found = [getattr(state, kind)[index] for state in ranks]
            what = f"operation {number}: {kind}[{index}]"
            for rank, (value, correct) in enumerate(zip(found, values, strict=True)):
                assert _near(value, correct, tolerance), (
                    f"{what} on rank {rank} is\n{value}\nand in one process\n{correct}"
                )
                if _near(correct, values[0], 0):
                    assert _near(value, found[0], 0), (
                        f"{what} on rank {rank} is\n{value}\nand on rank 0\n{found[0]}"
                    )


def _compare_with_torch(oracle: Oracle, ours: list[Played], torchs: list[Played | None]) -> None:
    tolerance = (
        0.0 if len(ours) == 2 else (0.05 if oracle.case.coarse else 1e-4) * max(1.0, oracle.largest)
    )
    for rank, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        assert theirs is not None
        assert theirs.error is None, f"torch's class raises on rank {rank}: {theirs.error}"
        for number, (state, other) in enumerate(zip(mine.states, theirs.states, strict=True)):
            # Buffers are all ranks' after an average, with torch's class before the next forward.
            kinds = ["gradients", "parameters"]
            if rank == 0 or isinstance(oracle.case.operations[number], Forward):
                kinds.append("buffers")
            for kind in kinds:
                pairs = zip(getattr(state, kind), getattr(other, kind), strict=True)
                for index, (value, correct) in enumerate(pairs):
                    assert _near(value, correct, tolerance), (
                        f"operation {number}: {kind}[{index}] on rank {rank} is\n{value}\nand with "
                        f"torch's class\n{correct}"
                    )


def _near(value: Any, correct: Any, tolerance: float) -> bool:
    if value is None or correct is None:
        return value is correct
    return bool((np.abs(value - correct) <= tolerance).all())


# Random cases -------------------------------------------------------------------------------------

BYTES = 2**-20
CAPS: list[Any] = [None, 0, 20 * BYTES, 80 * BYTES, (12 * BYTES, 100 * BYTES), float("inf")]


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    """Programs of a model, settings and blocks of operations."""
    kind = draw(st.sampled_from(["plain", "unused", "static"]))
    dtypes = draw(st.sampled_from([["float32"], ["float32", "float64"], ["bfloat16", "float32"]]))
    parameters = draw(
        st.lists(
            st.builds(Parameter, st.integers(1, 4), st.sampled_from(dtypes)),
            min_size=1,
            max_size=5,
        )
    )
    if draw(st.integers(0, 9)) == 0 and len(parameters) > 1:
        parameters[-1] = Parameter(parameters[-1].rows, parameters[-1].dtype, frozen=True)
    indices = st.integers(0, len(parameters) - 1)
    branches = draw(st.lists(st.lists(indices, min_size=1, max_size=3), min_size=1, max_size=3))
    if kind == "plain" and draw(st.integers(0, 9)):  # else a forgotten parameter
        branches[-1] += sorted(set(range(len(parameters))) - {i for b in branches for i in b})
    # Ranks that differ below a batch norm: nothing else may hide an order of collectives.
    below = kind == "unused" and draw(st.integers(0, 4)) == 0
    if below:
        branches.append([0])
    every = tuple(range(len(branches)))
    uses = st.tuples(
        *[
            st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True).map(tuple)
            for _ in range(world_size)
        ]
    )
    # Programs that are not as every pass must be are most often a matter of one error.
    usual = (every,) * world_size if kind == "plain" else draw(uses)
    regular = kind != "unused" and draw(st.integers(0, 4)) > 0
    divided = kind == "plain" and not regular and draw(st.integers(0, 3)) == 0
    use = st.just(usual) if regular else uses
    momentum = draw(st.sampled_from([0.0, 0.0, 0.9]))
    batch_norm = below or (regular and draw(st.integers(0, 3)) == 0)
    again = [None, None, "not reentrant", *(["reentrant"] if regular else [])]
    view = draw(st.booleans())
    blocks = st.one_of(*(_block(use, regular, len(parameters), world_size)))
    operations = tuple(
        op for block in draw(st.lists(blocks, min_size=1, max_size=6)) for op in block
    )
    writes = None if batch_norm else draw(st.sampled_from([None] * 8 + ["own", "alike"]))
    flat, shared_memory = draw(st.booleans()), draw(st.integers(0, 3)) > 0
    wrapped = draw(st.booleans())
    halves = (
        not (wrapped or flat or batch_norm or writes or any(p.frozen for p in parameters))
        and len(parameters) > 1
        and (kind == "unused" or (kind == "static" and regular))
        and not any(isinstance(op, Freeze | Join) for op in operations)
        and draw(st.booleans())
    )
    alike = flat and shared_memory and regular and writes is None and "bfloat16" not in dtypes
    return Case(
        world_size=world_size,
        parameters=tuple(parameters),
        branches=tuple(tuple(branch) for branch in branches),
        operations=operations,
        buffers=not batch_norm and draw(st.booleans()),
        wrapped=wrapped,
        bucket_cap_mb=draw(st.sampled_from(CAPS[1:4] if below else CAPS)),
        overlap=below or draw(st.booleans()),
        gradient_as_bucket_view=view,
        find_unused_parameters=kind == "unused" or (kind == "static" and draw(st.booleans())),
        static_graph=kind == "static",
        divided=divided,
        hook=None if below else draw(st.sampled_from([None, None, *HOOKS])),
        checkpoint=draw(st.sampled_from(again)),
        batch_norm=batch_norm,
        optimizer=draw(st.sampled_from(["SGD", "SGD", "AdamW"])),
        fuse_wgrad=draw(st.booleans()),
        flat=flat,
        node_shared=alike and _steps_with_averages(operations) and draw(st.booleans()),
        shared_memory=shared_memory,
        straggler_every=draw(st.sampled_from([None, None, 1, 3])),
        halves=halves,
        large=draw(st.booleans()),
        momentum=momentum,
        writes=writes,
        broadcast_buffers=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def _steps_with_averages(operations: tuple[Operation, ...]) -> bool:
    """Whether one copy of the parameters is enough: all ranks always step alike, where it lies."""
    local = False
    for op in operations:
        if isinstance(op, Join | Move | Freeze) or (local and isinstance(op, Step)):
            return False
        if isinstance(op, Backward | Zero):
            local = isinstance(op, Backward) and op.no_sync
    return True


def _block(
    use: st.SearchStrategy[Any], regular: bool, count: int, world_size: int
) -> list[st.SearchStrategy[list[Operation]]]:
    """What programs do, as lists of operations; the last of them is anything at all."""
    forward = st.builds(Forward, use)
    end = st.builds(
        lambda to_none, order: [Step(), Zero(to_none)][::order], st.booleans(), st.just(1)
    )
    accumulated = st.lists(
        st.builds(Forward, use, st.just(True)).map(lambda f: [f, Backward(no_sync=True)]),
        max_size=2,
    ).map(lambda pairs: [op for pair in pairs for op in pair])
    several = st.sampled_from(
        [
            [Backward((0, 1))],
            [Backward((1,)), Backward((0,))],
            [Backward((0,)), Backward((0,))],
            [Backward((1,), no_sync=True), Backward((0,))],
        ]
    )
    again = st.sampled_from(
        [
            [Backward(keep=True), Backward()],
            [Backward(keep=True, no_sync=True), Backward()],
            [Backward(keep=True), Backward(no_sync=True)],
        ]
    )
    parts = st.sampled_from(
        [
            [Backward(outputs="first", keep=True), Backward(outputs="rest")],
            [Backward(outputs="first", keep=True, no_sync=True), Backward(outputs="rest")],
            [Backward(outputs="first")],
        ]
    )
    freeze = st.builds(
        Freeze,
        st.integers(0, count - 1),
        st.booleans(),
        st.one_of(st.none(), st.integers(0, world_size - 1)),
    ).map(lambda op: [op])
    per_rank = [st.integers(0, 3)] * world_size
    weigh = st.tuples(*per_rank).filter(any).map(Weigh)
    steps = st.tuples(*per_rank).filter(any)
    blocks = [
        st.builds(lambda a, f, e: [*a, f, Backward(), *e], accumulated, forward, end),
        st.builds(lambda f, e: [f, Backward(), *e], forward, end),
        st.builds(lambda f, g, b, e: [f, g, *b, *e], forward, forward, several, end),
        st.builds(lambda f, b, e: [f, *b, *e], forward, again, end),
        st.builds(lambda w, f, e: [f, w, Backward(), *e], weigh, forward, end),
        st.integers(0, world_size - 1).map(lambda rank: [Evaluate(rank)]),
        st.integers(0, world_size - 1).map(lambda rank: [Transform(rank)]),
        st.sampled_from([[Move()], [Again()]]),
        # What another Reducer has accumulated, and a pass that may not use it.
        st.builds(lambda a, f, e: [*a, Again(), f, Backward(), *e], accumulated, forward, end),
        st.builds(Join, steps, st.booleans()).map(lambda op: [op]),
    ]
    if not regular:
        anything = st.one_of(
            forward,
            st.builds(
                Backward,
                st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True).map(tuple),
                st.sampled_from(["all", "first", "rest"]),
                st.booleans(),
                st.booleans(),
            ),
            st.builds(Zero, st.booleans()),
            weigh,
        )
        blocks += [
            st.builds(lambda f, b, e: [f, *b, *e], forward, parts, end),
            freeze,
            st.lists(anything, min_size=1, max_size=4),
        ]
    return blocks


def run(crew: Any, world_size: int, count: int, seed: int) -> Counter[str]:
    """Plays `count` random cases; `crew()` gives the ranks, new ones where they have ended."""
    total: Counter[str] = Counter()
    found: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(_settings(count))
    @hypothesis.given(cases(world_size))
    def fuzz(case: Case) -> None:
        try:
            total.update(check(crew(), case))
        except AssertionError as error:
            if not found:
                found.append(case)
                print(f"after {total['cases']} cases, to be shrunk: {error}", file=sys.stderr)
            raise

    fuzz()
    return total


def run_on_shards(crews: Any, shards: int, count: int, seed: int) -> Counter[str]:
    """Plays `count` random cases on so many shards; `crews()` gives crews of several sizes."""
    total: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(_settings(count))
    @hypothesis.given(sharded_cases(cases(shards)))
    def fuzz(case: Case) -> None:
        check_shards(crews(), case)
        total["cases"] += 1

    fuzz()
    return total


def _settings(count: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shards", type=int, metavar="V")
    args = parser.parse_args()
    crews: dict[int, Crew] = {}

    def crew(size: int) -> Crew:
        if size not in crews or crews[size].ended:
            crews[size] = Crew(args.backend, size)
        return crews[size]

    try:
        if args.shards is None:
            total = run(lambda: crew(args.ranks), args.ranks, args.cases, args.seed)
        else:
            both = lambda: (crew(1), crew(args.ranks))  # noqa: E731
            total = run_on_shards(both, args.shards, args.cases, args.seed)
    except AssertionError as error:
        sys.exit(str(error))
    finally:
        for started in crews.values():
            started.end()
    print(", ".join(f"{count} {what}" for what, count in total.items()), "- no mismatch")


if __name__ == "__main__":
    main()
