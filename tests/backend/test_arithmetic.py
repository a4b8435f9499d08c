"""Arithmetic of the shared-memory engine: rounds, folds, fingerprints. No processes."""

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch.backend import operations
from ddp_from_scratch.backend.reduction import Reduction
from ddp_from_scratch.backend.shared_memory import rounds_of

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies


@given(st.integers(1, 70))
def test_after_the_last_round_each_rank_has_heard_of_all(size):
    heard = [{rank} for rank in range(size)]
    for distances in rounds_of(size):
        heard = [
            own.union(*(heard[(rank - distance) % size] for distance in distances))
            for rank, own in enumerate(heard)
        ]
    assert all(own == set(range(size)) for own in heard)


SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("op", "dtype", "values", "expected"),
    [
        # In the order of ranks.
        (SUM, torch.float32, [1e8, -1e8, 1.0], 1.0),
        (SUM, torch.float32, [1.0, -1e8, 1e8], 0.0),
        # 1 + 2**-8 is not a bfloat16, which would round to 1 after each addition.
        (SUM, torch.bfloat16, [1.0, 2**-8, 2**-8], 1 + 2**-7),
        (AVG, torch.int64, [4, 3], 3),
        # Over a power of two it divides first, and cannot overflow.
        *((AVG, torch.float32, [LARGEST] * size, LARGEST) for size in (1, 2, 4)),
    ],
)
def test_a_reduction(op, dtype, values, expected):
    reduction = Reduction.of(op, dtype, len(values))
    result = torch.empty(1, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    total = reduction.fold([torch.tensor([value], dtype=dtype) for value in values], result)
    assert (total.dtype, total.item()) == (result.dtype, expected)
    assert reduction.divides_first == (op == AVG and dtype.is_floating_point and len(values) > 1)


def test_an_average_over_three_divides_the_sum_which_rounds_once():
    values = torch.arange(1.0, 1000.0)
    average = Reduction.of(AVG, torch.float32, 3)
    assert not average.divides_first
    # Thirds that are rounded one by one miss one value in four.
    assert average.fold([values, 2 * values, 4 * values], values.clone()).equal(7 * values / 3)


names = st.text("abc é", max_size=300)


@given(names, names, names)
def test_fingerprints_differ_where_operations_do_and_fit_their_memory(first, second, place):
    one, other = operations.fingerprint_of(first, place), operations.fingerprint_of(second, place)
    assert (one == other) == (first == second)
    assert not one.startswith(other) or one == other
    padded = one.ljust(operations.FINGERPRINT_NBYTES, b"x")
    assert operations.operation_in(padded)[:150] == first[:150]
