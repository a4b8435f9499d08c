"""A rank that computes wrongly is named before its step counts."""

import pickle
import re
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.common.errors import PeerWrongResultError
from ddp_from_scratch.virtual_ranks.deal import equal_counts, parts_of
from ddp_from_scratch.virtual_ranks.recheck import Case
from tests.support.on_ranks import on
from tests.support.recheck_soak import soak
from tests.support.tiers import slow
from tests.virtual_ranks.programs import (
    FIRST_TIER,
    PROGRAMS,
    STEPS,
    Training,
    bits_of,
    by_definition,
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_virtual_ranks_and_pairs_of_ranks_take_turns(ranks):
    for count in (4, 8, 16):
        parts = parts_of(range(count), equal_counts(count, ranks))
        cases = [Case.of(number, 7, parts) for number in range(count * (ranks - 1))]
        for turn in range(ranks - 1):
            of_turn = cases[turn * count : (turn + 1) * count]
            assert {case.virtual_rank for case in of_turn} == {*range(count)}
        for case in cases:
            assert case.virtual_rank in parts[case.owner]
            asked = {case.owner, case.checker, case.voter} - {None}
            assert len(asked) == min(ranks, 3)
        pairs = {(case.owner, case.checker) for case in cases}
        assert len(pairs) == ranks * (ranks - 1)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 64), (8, 64), (8, 1024)])
def test_the_first_few_checks_ask_all_ranks(ranks, count):
    parts = parts_of(range(count), equal_counts(count, ranks))
    cases = [Case.of(number, 0, parts) for number in range(2 * ranks)]
    assert {case.owner for case in cases} == {*range(ranks)}


def rechecked(world, name):
    training = Training(PROGRAMS[name], recheck_every=1)
    for step in range(STEPS):
        training.reducer.run_virtual_ranks(lambda v, step=step: training.run(step, v))
        training.optimizer.step()
    assert training.reducer.rechecked_steps == STEPS
    return bits_of(training.model, training.optimizer)


@pytest.mark.parametrize("crew", ["gloo-2", "gloo-3", slow("mpi-3"), slow("node-4")])
def test_checks_change_no_bit_and_raise_no_false_alarm(ranks, crew):
    backend, _, size = crew.partition("-")
    for name in FIRST_TIER:
        assert set(ranks(backend, int(size))(rechecked, name)) == {by_definition(name)}, name


@pytest.mark.slow
@pytest.mark.parametrize("crew", ["gloo-3", "mpi-2"])
def test_many_healthy_steps_raise_no_alarm(ranks, crew):
    backend, _, size = crew.partition("-")
    assert len({*ranks(backend, int(size))(soaked, limit=120)}) == 1


def soaked(world):
    return soak(300, world.world_size)


class Faulty:
    """A model on one rank of which one bit of one element is always wrong, if `active`."""

    def __init__(self, place):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.bit, self.active, first, norm, *_ = 0, False, *self.model
        if place == "output":
            first.register_forward_hook(lambda *given: self.flipped(given[-1]))
        elif place == "gradient":
            first.weight.register_hook(self.flipped)
        else:
            norm.register_forward_hook(lambda *_: self.flip(norm.running_mean.data))

    def flip(self, tensor):
        if self.active:
            words = tensor.view(-1).view(torch.int32)
            words[2] ^= 1 << self.bit if self.bit < 31 else -(2**31)

    def flipped(self, tensor):
        if not self.active:
            return tensor
        wrong = tensor.detach().clone()
        self.flip(wrong)
        return wrong if not tensor.requires_grad else Replaced.apply(tensor, wrong)

    def run(self, virtual_rank):
        self.model(torch.randn(4, 6)).square().mean().backward()


class Replaced(torch.autograd.Function):
    """The second tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx, right, wrong):
        return wrong

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def train(steps, reducer, faulty, optimizer):
    for _ in range(steps):
        reducer.run_virtual_ranks(faulty.run)
        optimizer.step()


def named(world, place, wrong, bits):
    """For each bit, the ranks that are named; a step is repeated without the fault, and counts."""
    faulty = Faulty(place)
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1)
    optimizer, found = torch.optim.SGD(faulty.model.parameters(), 0.01), []
    for bit in bits:
        faulty.bit, faulty.active = bit, world.rank == wrong
        with pytest.raises(ddp.WrongResultError) as error:
            train(4 * world.world_size, reducer, faulty, optimizer)
        assert isinstance(error.value, PeerWrongResultError) == (world.rank != error.value.rank)
        found.append(error.value.rank)
        faulty.active = False
        # Earlier steps may have counted with the fault, which is the same on all ranks.
        train(1, reducer, faulty, optimizer)
    ddp.check_sync(faulty.model)
    return found


SOME, ALL = (0, 13, 30), range(32)


@pytest.mark.parametrize("bits", [SOME, slow(ALL)])
@pytest.mark.parametrize("place", ["output", "gradient", "buffer"])
def test_the_rank_is_named_whichever_bit_is_wrong(ranks, place, bits):
    for wrong in (0, 2):
        found = ranks("gloo", 3)(named, place, wrong, bits, limit=60)
        assert found == [[wrong] * len(bits)] * 3


@on("gloo-3")
def test_an_occasional_fault_is_named(world):
    """One step in three is wrong."""
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1)

    def run(virtual_rank):
        faulty.active = world.rank == 1 and reducer.iteration % 3 == 0
        faulty.run(virtual_rank)

    def train_on():
        for _ in range(36):
            reducer.run_virtual_ranks(run)

    with pytest.raises(ddp.WrongResultError) as error:
        train_on()
    assert (error.value.rank, error.value.step % 3) == (1, 0)


@on("gloo-2")
def test_of_two_ranks_none_is_named(world):
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=2)
    faulty.active = world.rank == 1
    text = "in step 0, the gradient of 0.weight of virtual rank 0 has different bits on rank 0 on "
    with pytest.raises(ddp.WrongResultError, match=re.escape(text)) as error:
        reducer.run_virtual_ranks(faulty.run)
    assert error.value.rank is None
    faulty.active = False
    reducer.run_virtual_ranks(faulty.run)
    faulty.active = world.rank == 1
    reducer.run_virtual_ranks(faulty.run)  # step 1 is not checked


@on("gloo-3")
def test_a_mismatch_is_forgotten_with_its_step(world):
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=2)
    faulty.active = world.rank == 1
    with pytest.raises(ddp.WrongResultError):
        train(9, reducer, faulty, torch.optim.SGD(faulty.model.parameters(), 0.01))
    faulty.active = False

    def fail(virtual_rank):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reducer.run_virtual_ranks(fail)
    reducer.run_virtual_ranks(faulty.run)


@on("gloo-3")
def test_a_function_that_catches_the_error_is_stopped_all_the_same(world):
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1)
    faulty.active = world.rank == 2

    def run(virtual_rank):
        with suppress(RuntimeError):
            faulty.run(virtual_rank)

    def train_on():
        for _ in range(9):
            reducer.run_virtual_ranks(run)

    with pytest.raises(ddp.WrongResultError) as error:
        train_on()
    assert error.value.rank == 2


@on("gloo-3")
def test_a_vote_that_fails_ends_all_ranks(world):
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1)
    faulty.active = world.rank == 1

    def run(virtual_rank):
        if world.rank == 2 and virtual_rank == 0:  # rank 0's, which rank 1 has repeated
            raise ZeroDivisionError
        faulty.run(virtual_rank)

    with pytest.raises(ZeroDivisionError if world.rank == 2 else ddp.WrongResultError):
        reducer.run_virtual_ranks(run)


def state_after(world, fails):
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1)
    calls = []

    def run(virtual_rank):
        calls.append(virtual_rank)
        faulty.run(virtual_rank)
        if fails and world.rank == 1 and len(calls) == 1:
            raise ZeroDivisionError

    if fails and world.rank == 1:
        with pytest.raises(ZeroDivisionError):
            reducer.run_virtual_ranks(run)
        assert calls == [0]  # of rank 0, which waits
    reducer.run_virtual_ranks(run)
    gradients = [parameter.grad for parameter in faulty.model.parameters()]
    return [tensor.tolist() for tensor in [*gradients, *faulty.model.buffers()]]


def test_a_step_that_fails_while_a_rank_checks_can_be_repeated(ranks):
    failed = ranks("gloo", 2)(state_after, True)
    assert failed == ranks("gloo", 2)(state_after, False)


@on("gloo-2")
def test_buffers_that_ranks_ignore_are_not_compared(world):
    faulty = Faulty("gradient")
    ddp.broadcast_parameters(faulty.model)
    norm = "1.num_batches_tracked"
    faulty.model[1].num_batches_tracked += world.rank
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1, ignore=[norm])
    for _ in range(4):
        reducer.run_virtual_ranks(faulty.run)


@pytest.mark.parametrize("kind", [ddp.WrongResultError, PeerWrongResultError])
def test_the_error_can_be_sent(kind):
    error = pickle.loads(pickle.dumps(kind("rank 1 computes wrongly", 1, 7, 3)))
    assert (type(error), str(error)) == (kind, "rank 1 computes wrongly")
    assert (error.rank, error.step, error.virtual_rank) == (1, 7, 3)


@on("gloo-2")
def test_machines_must_be_equal(world):
    faulty = Faulty("gradient")
    reducer = ddp.Reducer(faulty.model, virtual_ranks=4, recheck_every=1)
    threads = patch.object(torch, "get_num_threads", lambda: 1 + world.rank)
    text = "rank 1 has .*, 2 threads, .*; leave recheck out, or give all the same"
    with threads, pytest.raises(ddp.UsageError, match=text) as error:
        reducer.run_virtual_ranks(faulty.run)
    assert isinstance(error.value, ddp.PeerError) == (world.rank == 1)


def test_refusals(alone):
    model = nn.Linear(2, 2)
    for options, text in (
        ({"recheck_every": 1}, "recheck_every=1 needs virtual ranks: add virtual_ranks=V"),
        ({"recheck_every": 0, "virtual_ranks": 2}, "recheck_every must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            ddp.Reducer(model, **options)
    reducer = ddp.Reducer(model, virtual_ranks=2, recheck_every=1)
    with pytest.raises(RuntimeError, match="use run_virtual_ranks"), reducer.virtual_rank(1):
        pass
    assert len(reducer.run_virtual_ranks(lambda v: model(torch.ones(1, 2)).sum().backward())) == 2
