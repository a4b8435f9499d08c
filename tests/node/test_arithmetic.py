"""Arithmetic of the shared-memory engine: shares, rounds, folds, fingerprints. No processes."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.node import fingerprint
from ddp_from_scratch.node.dissemination import rounds_of
from ddp_from_scratch.node.reduction import Reduction
from ddp_from_scratch.node.staging import share_of

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_shares_cover_everything_once(numel, owners):
    shares = [share_of(numel, rank, owners) for rank in range(owners)]
    assert shares[0][0] == 0
    assert shares[-1][1] == numel
    assert all(end == begin for (_, end), (begin, _) in pairwise(shares))
    assert all(begin % 16 == 0 or begin == numel for begin, _ in shares)


def test_a_rank_past_the_owners_has_no_share():
    assert share_of(100, 3, 2) == (100, 100)


@given(st.integers(1, 70))
def test_after_the_last_round_each_rank_has_heard_of_all(size):
    heard = [{rank} for rank in range(size)]
    for distances in rounds_of(size):
        heard = [
            own.union(*(heard[(rank - distance) % size] for distance in distances))
            for rank, own in enumerate(heard)
        ]
    assert all(own == set(range(size)) for own in heard)


def test_a_reduction_keeps_the_order_of_ranks():
    tensors = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    sum_of = Reduction.of(dist.ReduceOp.SUM, torch.float32, 3)
    assert sum_of.fold(tensors, torch.empty(1)).item() == 1.0
    assert sum_of.fold(tensors[::-1], torch.empty(1)).item() == 0.0
    average = Reduction.of(dist.ReduceOp.AVG, torch.int64, 2)
    assert average.fold([torch.tensor([4]), torch.tensor([3])], torch.empty(1).long()).item() == 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_average_over_a_power_of_two_divides_first_and_cannot_overflow(size):
    average = Reduction.of(dist.ReduceOp.AVG, torch.float32, size)
    largest = torch.finfo(torch.float32).max
    tensors = [torch.tensor([largest])] * size
    assert average.divides_first == (size > 1)
    assert average.fold(tensors, torch.empty(1)).item() == largest


def test_an_average_over_three_divides_the_sum_which_rounds_once():
    values = torch.arange(1.0, 1000.0)
    average = Reduction.of(dist.ReduceOp.AVG, torch.float32, 3)
    assert not average.divides_first
    # Thirds that are rounded one by one miss one value in four.
    assert average.fold([values, 2 * values, 4 * values], values.clone()).equal(7 * values / 3)


def test_sixteen_bit_floats_are_folded_in_float32():
    # 1 + 2**-8 is not a bfloat16: it would round to 1 after each addition.
    tensors = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2**-8, 2**-8)]
    total = Reduction.of(dist.ReduceOp.SUM, torch.bfloat16, 3).fold(tensors, torch.empty(1))
    assert (total.dtype, total.item()) == (torch.float32, 1 + 2**-7)


def test_the_sum_of_an_average_is_undivided():
    average = Reduction.of(dist.ReduceOp.AVG, torch.float32, 4)
    tensors = [torch.tensor([float(rank)]) for rank in range(4)]
    assert average.undivided.fold(tensors, torch.empty(1)).item() == 6.0
    assert average.fold(tensors, torch.empty(1)).item() == 1.5


names = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=300)


@given(names, names, names)
def test_fingerprints_differ_where_operations_do(first, second, place):
    one, other = fingerprint.encode(first, place), fingerprint.encode(second, place)
    assert (one == other) == (first == second)
    assert not one.startswith(other) or one == other


@given(st.text("abc", max_size=300), st.text("abc", max_size=300))
def test_a_fingerprint_fits_its_memory_and_gives_the_operation_back(operation, place):
    encoded = fingerprint.encode(operation, place)
    padded = encoded.ljust(fingerprint.NBYTES, b"x")
    assert len(padded) == fingerprint.NBYTES
    assert fingerprint.operation_in(padded)[:150] == operation[:150]
    assert fingerprint.split(padded * 3) == [padded] * 3


def test_a_difference_names_ranks_by_operation_and_other_machines_once():
    here = [(0, "broadcast"), (1, "barrier"), (2, "barrier")]
    assert fingerprint.describe_difference(here, ["barrier", "reduce", "reduce"]) == (
        "rank 0 broadcast; ranks 1, 2 barrier; another machine's ranks reduce"
    )
