"""python -m tests.support.recheck_soak --steps 10000: rechecks of healthy ranks, without an alarm.

A small model with dropout and batch norm trains in bf16 autocast, its optimizer in shards over all
ranks. In each step one virtual rank is computed twice, and virtual ranks are dealt at random.
"""

import argparse
import random
import sys
import time
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch.virtual_ranks.balance import Balance
from tests.virtual_ranks.programs import VIRTUAL_RANKS, Program, cnn

PROGRAM = Program(cnn, autocast=True)


def soak(steps: int, seed: int) -> str:
    """Trains for so many steps; returns the checksum of the parameters, the same on all ranks."""
    draw, ranks = random.Random(seed), dist.get_world_size()
    model = PROGRAM.model()
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, virtual_ranks=VIRTUAL_RANKS, balance=True, recheck_every=1)
    balance = reducer.core.observer(Balance)
    assert balance is not None
    balance.learn = lambda seconds: None  # type: ignore[method-assign]
    optimizer = ddp.AdamW(model.parameters(), lr=1e-3, reducer=reducer, shard="world")
    reducer.set_step(0, seed)
    for step in range(steps):
        cuts = sorted(draw.sample(range(1, VIRTUAL_RANKS), ranks - 1))
        balance.counts = [end - begin for begin, end in pairwise([0, *cuts, VIRTUAL_RANKS])]
        reducer.run_virtual_ranks(lambda v, step=step: PROGRAM.backward(model, step, v, 0))
        optimizer.step()
    checksum = ddp.check_sync(model, optimizers=[optimizer])
    reducer.remove()
    return checksum


def on_rank(steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    with ddp.process_group("gloo") as world:
        began = time.monotonic()
        checksum = soak(steps, seed)
        if world.rank == 0:
            seconds = time.monotonic() - began
            print(f"{steps:,} steps on {world.world_size} ranks in {seconds:.0f} s: no alarm")
            print(f"parameters {checksum}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.recheck_soak")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return ddp.start_ranks(partial(on_rank, options.steps, options.seed), [options.nproc])


if __name__ == "__main__":
    sys.exit(main())
