"""Random programs on shards: each shard plays the part of a rank of an ordinary case.

One process that plays all shards says what each step must leave, up to the order of sums, and crews
of all sizes must hold the same bits after it.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis
import numpy as np
import torch.distributed as dist
from hypothesis import strategies as st

import ddp_from_scratch as ddp
from tests.support.fuzz_case import (
    TORCHS,
    Backward,
    Case,
    Forward,
    Net,
    Operation,
    Player,
    State,
    Step,
    Zero,
)
from tests.support.fuzz_oracle import Oracle
from tests.support.machines import group_over
from tests.support.ranks import Crew
from tests.support.terms import as_large


@st.composite
def sharded_cases(draw: st.DrawFn, ordinary: st.SearchStrategy[Case]) -> Case:
    """Takes an ordinary case's model and settings; `world_size` is the number of shards."""
    case = draw(ordinary)
    every = tuple(range(len(case.branches)))
    uses = st.just(every)
    if case.find_unused_parameters:
        uses = st.lists(st.sampled_from(every), min_size=1, unique=True).map(tuple)
    use = st.tuples(*[uses] * case.world_size)
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 2))):
            operations += [Forward(draw(use), no_sync=True), Backward(no_sync=True)]
        operations += [Forward(draw(use)), Backward(), Step(), Zero()]
    return replace(
        case,
        operations=tuple(operations),
        broadcast_buffers=True,
        fuse_wgrad=case.fuse_wgrad and not case.batch_norm,
        **dict.fromkeys(("wrapped", "static_graph", "divided", "node_shared", "halves"), False),
        **dict.fromkeys(("hook", "writes", "straggler_every"), None),
    )


def check_shards(crews: Sequence[Crew], case: Case) -> None:
    """Plays a case on all crews, those of three ranks or more also as two machines.

    Raises:
        AssertionError: bits differ between crews, or values from those of one process.
    """
    oracle = Oracle(case)
    # Without errors, and without operations that make no sense.
    hypothesis.assume(oracle.case.operations == case.operations)
    hypothesis.assume(not any(e.must or e.may for e in oracle.expected))
    played = [
        crew(play_shards, oracle.case, machines)
        for crew in crews
        for machines in (1, 2)[: 1 + (crew.world_size > 2)]
    ]
    steps = [n for n, op in enumerate(oracle.case.operations) if isinstance(op, Step)]
    for number, step in enumerate(steps):
        expected = oracle.expected[step].states
        assert expected is not None
        states = [of_rank[number] for ranks in played for of_rank in ranks]
        tolerance = (0.05 if case.coarse else 1e-4) * max(1.0, oracle.largest)
        for kind in ("parameters", "buffers"):
            rows = [getattr(state, kind) for state in [expected[0], *states]]
            for index, (right, first, *rest) in enumerate(zip(*rows, strict=True)):
                what = f"step {number}: {kind}[{index}] of\n{oracle.case}"
                assert np.allclose(first, right, 0, tolerance), f"{first}\nis not\n{right}\n{what}"
                for other in rest:
                    same = first.tobytes() == other.tobytes()
                    assert same, f"{other}\nhas not the bits of\n{first}\n{what}"


def play_shards(world: Any, case: Case, machines: int) -> list[State]:
    """Plays the case on this rank's shards; what it held after each step."""
    with as_large() if case.large else nullcontext():
        return _play_shards(world, case, machines)


def _play_shards(world: Any, case: Case, machines: int) -> list[State]:
    model = Net(case, 0)
    group = group_over(world, lambda rank: rank % 2) if machines == 2 else None
    reducer = ddp.Reducer(
        model,
        group,
        bucket_cap_mb=case.bucket_cap_mb,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        find_unused_parameters=case.find_unused_parameters,
        fuse_wgrad=case.fuse_wgrad,
        overlap=case.overlap,
        shared_memory=case.shared_memory,
        shards=case.world_size,
    )

    def optimizer(parameters: Any, **settings: Any) -> Any:
        if case.flat:
            return getattr(ddp, case.optimizer)(parameters, reducer=reducer, **settings)
        return TORCHS[case.optimizer](parameters, **settings)

    if case.batch_norm:
        ddp.convert_sync_batchnorm(model, group)
    player = Player(case, 0, model, no_sync=reducer.no_sync, optimizer=optimizer)
    states: list[State] = []
    numbered: list[tuple[int, Operation]] = []
    for number, op in enumerate(case.operations):
        if isinstance(op, Forward | Backward):
            numbered.append((number, op))
            continue
        if isinstance(op, Step):
            reducer.run_shards(partial(_play_shard, player, tuple(numbered)))
            numbered.clear()
        player.play(number, op)
        if isinstance(op, Step):
            states.append(player.state())
    reducer.remove()
    if group is not None:
        dist.destroy_process_group(group)
    return states


def _play_shard(player: Player, operations: Sequence[tuple[int, Operation]], shard: int) -> None:
    # A copy with graphs of its own: in lock step others play their parts in the middle of it.
    player = copy.copy(player)
    player.rank, player.graphs = shard, []
    for number, op in operations:
        player.play(number, op)
