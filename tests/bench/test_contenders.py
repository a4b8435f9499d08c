"""bench/contenders.py: rows of a table, and that all of them train the same."""

import pytest
import torch

from ddp_from_scratch import node
from ddp_from_scratch.bench import contenders as c
from ddp_from_scratch.bench import prepare, timing
from ddp_from_scratch.bench.workloads import Transformer, Workload, text_batch
from tests.support.tiers import slow

TINY = Workload(
    "tiny", lambda: Transformer(11, 5, width=8, heads=2, depth=1), lambda: text_batch(2, 5, 11)
)
RUNGS = [spec.name for spec in c.CONTENDERS]


def names(*arguments):
    return [spec.name for spec in c.rows(*arguments)]


def test_rows_are_named_after_contender_and_backend():
    found = names(["gloo", "mpi"], "sgd", ["ddp.SGD, one flat bucket", "torch DDP, views"])
    references = [name.replace("DDP", "DDP on gloo") for name in c.REFERENCES]
    there = [name for name in references if name in found]
    assert there[:2] == references[:2]  # of every version of torch
    assert set(found) - set(there) == {
        c.NO_COMMUNICATION,
        "torch DDP on mpi, views",
        "torch DDP on node, views",
        "ddp.SGD on gloo, one flat bucket",
        "ddp.SGD on mpi, one flat bucket",
    }


def test_rungs_and_other_optimizers_are_rows_where_they_are_asked_for():
    found = names(["gloo"])
    assert "Reducer on gloo, no shared memory" in found
    assert not any("per parameter" in name or "Zero" in name for name in found)
    adamw = names(["gloo"], "adamw", RUNGS)
    assert {"ddp.AdamW on gloo", "NodeSharedAdamW on gloo"} <= set(adamw)
    assert "torch DDP on gloo, ZeroRedundancyOptimizer" in adamw
    assert "Reducer on gloo, one all-reduce per parameter" in adamw


def test_on_mpi_alone_and_nccl_the_reference_is_there():
    assert "torch DDP on gloo, views" in names(["mpi"], "sgd", [])
    assert names(["nccl"], "sgd", ["NodeSharedSGD"])[1] == "torch DDP on nccl, default"
    assert not any("gloo" in name or "NodeShared" in name for name in names(["nccl"]))


def test_buckets_get_smaller_toward_the_end():
    model = torch.nn.Linear(4096, 1024, bias=False)  # 16 MiB
    assert prepare.tapering_caps(model) == [4, 4, 4, 2, 1, 1]
    assert prepare.tapering_caps(torch.nn.Linear(1, 1)) == [1] * 6


def train_all(world, optimizer):
    backends = ["gloo", "mpi"] if world.backend == "mpi" else [world.backend]
    specs = c.rows(backends, optimizer, RUNGS)
    others = {spec.group for spec in specs if spec.group} - {world.backend}
    assert node.ProcessGroupNode.backend == "node"
    groups = {name: torch.distributed.new_group(backend=name) for name in sorted(others)}
    torch.manual_seed(world.rank)
    compared = c.contenders(TINY, world.device, specs, groups, optimizer)
    rounds = timing.rounds_for(None, 2, world.device, "")
    samples = timing.interleave(compared, rounds, world.device)
    timing.check_equal(compared)
    assert [s.name for s in samples] == [s.name for s in specs]
    assert {len(s.milliseconds) for s in samples} == {2}
    by_the_clock = list(timing.rounds_for(1e-9, None, world.device, ""))
    assert by_the_clock == list(range(timing.FEWEST_ROUNDS))
    return [s.milliseconds for s in samples]


@pytest.mark.parametrize(
    ("backend", "optimizer"), [("gloo", "adamw"), ("mpi", "sgd"), slow("gloo", "sgd")]
)
def test_every_contender_trains_to_the_same_parameters(ranks, backend, optimizer):
    everyone = ranks(backend, 2)(train_all, optimizer)
    assert everyone[0] == everyone[1]  # the slowest rank's


def diverging(world):
    def wrong(model, group, optimizers):
        training = prepare.reducer()(model, group, optimizers)
        return prepare.Training(
            training.forward, training.zero_grad, lambda loss: training.update(2 * loss)
        )

    references = [s for s in c.CONTENDERS if s.name in c.REFERENCES]
    for way, error in {
        prepare.alone: "not the same on all",
        wrong: "x and torch DDP, default have",
    }.items():
        chosen = [*references, c.ContenderSpec("x", way)]
        torch.manual_seed(world.rank)
        compared = c.contenders(TINY, world.device, chosen)
        timing.interleave(compared, range(1), world.device)
        with pytest.raises(RuntimeError, match=error):
            timing.check_equal(compared)


def test_what_did_not_train_alike_is_not_compared(ranks):
    ranks("gloo", 2)(diverging)
