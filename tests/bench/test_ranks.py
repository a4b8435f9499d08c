"""All contenders train the same, on ranks."""

import pytest
import torch

from ddp_from_scratch.bench import contenders as c
from ddp_from_scratch.bench import timing
from ddp_from_scratch.bench.workloads import Transformer, Workload, text_batch
from tests.support.on_ranks import on
from tests.support.tiers import slow

TINY = Workload(
    "tiny", lambda: Transformer(11, 5, width=8, heads=2, depth=1), lambda: text_batch(2, 5, 11)
)


def train_all(world, optimizer):
    backends = ["gloo", "mpi"] if world.backend == "mpi" else [world.backend]
    specs = c.rows(backends, optimizer, [spec.name for spec in c.CONTENDERS])
    others = {spec.group for spec in specs if spec.group} - {world.backend}
    groups = {name: torch.distributed.new_group(backend=name) for name in sorted(others)}
    compared = c.contenders(TINY, world.device, specs, groups, c.OPTIMIZERS[optimizer])
    rounds = timing.rounds_for(0.0, 2, world.device, "")
    timing.warm_up(compared)
    timing.check_equal(compared)
    samples = timing.interleave(compared, rounds, world.device)
    timing.check_equal(compared)
    timing.check_equal(compared[:1])  # no communication, which `--way alone` runs by itself
    assert [s.name for s in samples] == [s.name for s in specs]
    assert {len(s.milliseconds) for s in samples} == {2}
    return [s.milliseconds for s in samples]


@pytest.mark.parametrize(
    ("backend", "optimizer"), [("gloo", "adamw"), slow("mpi", "sgd"), slow("gloo", "sgd")]
)
def test_every_contender_trains_to_the_same_parameters(ranks, backend, optimizer):
    everyone = ranks(backend, 2)(train_all, optimizer)
    assert everyone[0] == everyone[1]  # the slowest rank's


@on("gloo-2")
def test_what_did_not_train_alike_is_not_compared(world):
    def wrong(model, group, optimizers):
        training = c.reducer()(model, group, optimizers)
        return c.Training(
            training.forward, training.zero_grad, lambda loss: training.update(2 * loss)
        )

    references = [s for s in c.CONTENDERS if s.name.startswith(c.TORCH) and "sgd" in s.optimizers]
    for way, error in {
        c.alone: "not the same on all",
        wrong: "x and torch DDP, default have",
    }.items():
        torch.manual_seed(world.rank)
        chosen = [*references, c.ContenderSpec("x", way)]
        compared = c.contenders(TINY, world.device, chosen)
        timing.warm_up(compared)
        with pytest.raises(RuntimeError, match=error):
            timing.check_equal(compared)
