"""A rank that computes wrongly is named before a run."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.virtual_ranks import recheck
from ddp_from_scratch.virtual_ranks.check_ranks import Answer, report_of
from tests.support.on_ranks import on
from tests.support.tiers import slow
from tests.virtual_ranks.test_recheck import Faulty

RIGHT = {"the result": 1, "the gradient of w": 2, "buffer b": 3}
WRONG = RIGHT | {"the gradient of w": 4}
ALSO_WRONG = RIGHT | {"buffer b": 5}
W = "the gradient of w"


def answer(bits, *strays, machine="one kind"):
    return Answer("h", machine, bits, 100, len(strays), *strays[:1])


# By what the ranks have computed, the wrong ones and the line.
VOTES = {
    "one rank": ([RIGHT], [], "one rank computed the same bits, at least 100 times each"),
    "equal": ([RIGHT] * 3, [], "all 3 ranks computed the same bits, at least 100 times each"),
    "one of three": (
        *([RIGHT, WRONG, RIGHT], [1]),
        f"rank 1 on h computes wrongly: {W} has different bits there than on ranks 0, 2",
    ),
    "two of five, in different ways": (
        *([RIGHT, WRONG, RIGHT, RIGHT, ALSO_WRONG], [1, 4]),
        f"rank 1 on h computes wrongly: {W} has different bits there than on ranks 0, 2, 3; "
        "rank 4 on h computes wrongly: buffer b has different bits there than on ranks 0, 2, 3",
    ),
    "a gradient that others lack": (
        *([WRONG, {"the result": 1}, {"the result": 1}], [0]),
        f"rank 0 on h computes wrongly: {W} has different bits there than on ranks 1, 2",
    ),
    "one of two": (
        *([RIGHT, WRONG], []),
        f"{W} has different bits on rank 0 on h, rank 1 on h: no majority shows which is wrong",
    ),
    "two of four": (
        *([RIGHT, WRONG, RIGHT, WRONG], []),
        f"{W} has different bits on rank 0 on h, rank 1 on h, rank 2 on h, rank 3 on h: no "
        "majority shows which is wrong",
    ),
}


@pytest.mark.parametrize("name", VOTES)
def test_the_vote(name):
    found, wrong, text = VOTES[name]
    report = report_of([answer(bits) for bits in found])
    assert (report.wrong, str(report)) == (tuple(wrong), text)
    assert report.equal == text.endswith("100 times each")
    assert report.unequal == ""


def test_a_rank_that_differs_from_itself_is_named_and_has_no_vote():
    unsteady = answer(RIGHT, WRONG, WRONG, ALSO_WRONG)
    told = f"on h does not repeat its bits: {W} differs in 3 of 100 repetitions"
    report = report_of([answer(RIGHT), unsteady])
    assert (report.wrong, str(report)) == ((1,), f"rank 1 {told}")
    # Also one whose first repetition was wrong.
    report = report_of([answer(WRONG, RIGHT), answer(RIGHT), answer(WRONG), answer(RIGHT)])
    assert report.wrong == (0, 2)
    report = report_of([unsteady, unsteady])
    hint = "as no rank repeats its bits, the work may not be deterministic"
    assert (report.wrong, report.equal) == ((0, 1), False)
    assert str(report) == f"rank 0 {told}; rank 1 {told}; {hint}"


def test_machines_that_differ_are_named():
    differ = "rank 0 has one kind, rank 1 has another"
    report = report_of([answer(RIGHT), answer(RIGHT, machine="another")])
    assert (report.equal, report.unequal) == (True, differ)
    report = report_of([answer(RIGHT), answer(WRONG, machine="another")])
    assert str(report).endswith(f"shows which is wrong; their machines differ: {differ}")


def checked(world, place="gradient", wrong=None, every=1):
    """The report as far as it does not depend on time; all are left with rank 0's model."""
    faulty, calls = Faulty(place), 0
    states = faulty.model.state_dict()
    rank_0s = {name: tensor.clone() for name, tensor in states.items()}
    for tensor in states.values():
        tensor.add_(world.rank)
    parameter = next(faulty.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    generator = torch.get_rng_state()

    def run():
        nonlocal calls
        calls += 1
        faulty.active = world.rank == wrong and calls % every == 0
        faulty.run(0)

    report = ddp.check_ranks(faulty.model, run, 0.05)
    assert all(rank_0s[name].equal(tensor) for name, tensor in states.items())
    assert generator.equal(torch.get_rng_state())
    assert parameter.grad.equal(torch.ones_like(parameter))
    assert len(report.seconds) == len(report.repetitions) == world.world_size
    assert min(report.repetitions) >= 2
    assert report.repetitions[world.rank] == calls - 1
    return report.equal, report.wrong, str(report).partition(", at least ")[0]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("place", ["gradient", "buffer"])
def test_a_rank_of_three_is_named(ranks, backend, place):
    (found,) = {*ranks(backend, 3)(checked, place, 1)}
    assert found[:2] == (False, (1,))
    what = {"gradient": "the gradient of 0.weight", "buffer": "buffer 1.running_mean"}[place]
    told = f" computes wrongly: {what} has different bits there than on ranks 0, 2"
    assert found[2].startswith("rank 1 on ")
    assert found[2].endswith(told)


@pytest.mark.parametrize("backend", ["gloo", slow("mpi")])
def test_healthy_ranks_are_equal(ranks, backend):
    told = (True, (), "all 3 ranks computed the same bits")
    assert ranks(backend, 3)(checked) == [told] * 3


def test_of_two_ranks_none_is_named_unless_it_differs_from_itself(ranks):
    (found,) = {*ranks("gloo", 2)(checked, "gradient", 1)}
    assert found[:2] == (False, ())
    assert "the gradient of 0.weight has different bits on rank 0 on " in found[2]
    (found,) = {*ranks("gloo", 2)(checked, "gradient", 1, 3)}
    assert found[:2] == (False, (1,))
    assert " does not repeat its bits: the gradient of 0.weight differs in " in found[2]


@on("gloo-2")
def test_the_loss_and_machines_are_compared(world):
    model = nn.Linear(2, 2)
    with patch.object(recheck, "processor_name", lambda: f"kind {world.rank}"):
        report = ddp.check_ranks(model, lambda: 1 + world.rank * 2**-52, 0.01)
    assert "the result has different bits on rank 0 on " in str(report)
    assert report.unequal.startswith("rank 0 has kind 0, ")


def test_refusals(alone):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="seconds must be more than 0, got 0"):
        ddp.check_ranks(model, lambda: None, 0)
    reducer = ddp.Reducer(model)
    with pytest.raises(ValueError, match="the module has a Reducer, which would average"):
        ddp.check_ranks(model, lambda: None, 1)
    reducer.remove()
    batch_norm = ddp.convert_sync_batchnorm(nn.Sequential(model, nn.BatchNorm1d(2)))
    for communicates in (batch_norm, nn.parallel.DistributedDataParallel(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="the module communicates in each pass"):
            ddp.check_ranks(communicates, lambda: None, 1)
    report = ddp.check_ranks(model, lambda: model(torch.ones(1, 2)).sum().backward(), 0.01)
    assert (report.equal, model.weight.grad) == (True, None)
