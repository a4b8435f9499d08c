"""python -m tests.support.fuzz_virtual_ranks --cases 500: random programs on virtual ranks.

Virtual ranks are dealt at random before each step. In some steps a rank repeats another's work
(`recheck_every`); some steps fail on all ranks, and are repeated as a whole or in part. At the end
parameters, buffers and the optimizer's state must have the bits that one process computes
(`tests.virtual_ranks.programs.computed`). A seed draws the same cases again.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

import ddp_from_scratch as ddp
from ddp_from_scratch.virtual_ranks.balance import Balance
from tests.support.ranks import Crew
from tests.virtual_ranks.programs import (
    SMALL,
    UNUSED,
    VIEWS,
    Branches,
    Checkpointed,
    Counting,
    Program,
    Training,
    bits_of,
    cnn,
    computed,
)


@dataclass(frozen=True)
class Attempt:
    """One try at a step.

    `deal` is the number of virtual ranks by rank. Before its virtual rank number `stops[rank]`
    each rank fails, and `keeps` what it has finished; with () none does.
    """

    step: int
    deal: tuple[int, ...]
    stops: tuple[int, ...] = ()
    keeps: bool = False


@dataclass(frozen=True)
class Case:
    program: Program
    virtual_ranks: int
    recheck_every: int | None
    steps: int
    attempts: tuple[Attempt, ...]


class Stop(Exception):
    """Ends an attempt."""


def draw_case(draw: random.Random, ranks: int) -> Case:
    def once_in(count: int) -> bool:
        return draw.randrange(count) == 0

    virtual_ranks = draw.choice([count for count in (2, 4, 8, 16) if count >= ranks])
    steps = draw.randint(2, 4)
    attempts = []
    for step in range(steps):
        while True:
            cuts = sorted(draw.sample(range(1, virtual_ranks), ranks - 1))
            deal = tuple(end - begin for begin, end in pairwise([0, *cuts, virtual_ranks]))
            if not once_in(4):
                attempts.append(Attempt(step, deal))
                break
            stops = tuple(draw.randrange(count) for count in deal)
            attempts.append(Attempt(step, deal, stops, keeps=draw.random() < 0.5))
    recheck_every = draw.choice([None, 1, 2]) if ranks > 1 else None
    return Case(draw_program(draw, once_in), virtual_ranks, recheck_every, steps, tuple(attempts))


def draw_program(draw: random.Random, once_in: Callable[[int], bool]) -> Program:
    make: Any = draw.choice([cnn, cnn, Branches, Checkpointed, Counting])
    dtype = draw.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
    flat = dtype.itemsize > 2 and once_in(2)
    options = draw.choice([SMALL, {}, {"bucket_cap_mb": 1e-3}])
    options = options | (UNUSED if make in (Branches, Checkpointed) or once_in(4) else {})
    options = options | (VIEWS if once_in(2) else {})
    options = options | ({"fuse_wgrad": True} if make is cnn and once_in(4) else {})
    if once_in(4):
        options = options | {"check_every": 1}
    return Program(
        make,
        options,
        draw.choice(["SGD", "AdamW"]),
        flat,
        draw.choice(["none", "world"]) if flat else "none",
        accumulate=draw.choice([1, 1, 2]),
        dtype=dtype,
        autocast=dtype == torch.float32 and once_in(4),
        large=once_in(2),
    )


def play(world: ddp.World, case: Case) -> str:
    options = {} if case.recheck_every is None else {"recheck_every": case.recheck_every}
    training = Training(case.program, None, case.virtual_ranks, balance=True, **options)
    reducer = training.reducer
    balance = reducer.core.observer(Balance)
    assert balance is not None
    balance.learn = lambda seconds: None  # type: ignore[method-assign]
    rest_of: int | None = None  # the step of which some virtual ranks are kept
    for attempt in case.attempts:
        if rest_of is None:
            balance.counts = list(attempt.deal)
        order = list(reducer.virtual_rank_range)
        stops = order[attempt.stops[world.rank] % len(order)] if attempt.stops else None

        def run(virtual_rank: int, attempt: Attempt = attempt, stops: int | None = stops) -> None:
            if virtual_rank == stops:
                raise Stop
            training.run(attempt.step, virtual_rank)

        try:
            reducer.run_virtual_ranks(run)
        except Stop:
            reducer.set_step(attempt.step, keep=attempt.keeps)
            rest_of = attempt.step if attempt.keeps else None
            continue
        rest_of = None
        training.optimizer.step()
    bits = bits_of(training.model, training.optimizer)
    reducer.remove()
    return bits


def check(crew: Crew, case: Case) -> None:
    found = crew(play, case)
    expected = computed(case.program, case.virtual_ranks, case.steps)
    if set(found) != {expected}:
        raise AssertionError(f"by rank {found}, in one process {expected}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.fuzz_virtual_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--ranks", type=int, default=3)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    torch.set_num_threads(1)  # as ranks have: bits depend on it
    crew = Crew(args.backend, args.ranks)
    try:
        for number in range(args.cases):
            case = draw_case(draw, args.ranks)
            try:
                check(crew, case)
            except AssertionError as error:
                print(f"case {number} of seed {args.seed}:\n{case}\n{error}")
                return 1
    finally:
        crew.end()
    print(f"{args.cases} cases on {args.ranks} ranks of {args.backend} - no mismatch")
    return 0


if __name__ == "__main__":
    # By its name, under which ranks import it, too.
    from tests.support import fuzz_virtual_ranks

    sys.exit(fuzz_virtual_ranks.main())
