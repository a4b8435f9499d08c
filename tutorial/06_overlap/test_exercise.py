import random

import pytest
import torch
import torch.distributed as dist


@pytest.mark.parametrize(
    ("orders", "place"),
    [
        (["abc", "abc"], None),
        (["abc", "acb"], 1),
        (["abc", "abc", "bac"], 0),
        (["abc", "ab"], 2),
        ([""], None),
    ],
)
def test_first_mismatch(exercise, orders, place):
    found = exercise.first_mismatch([list(order) for order in orders])
    assert found == place, f"the ranks launch {orders}"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 3, 2], [3, 0, 1, 2]], ids=str)
def test_agreed_order(exercise, order):
    agreed, launched = exercise.AgreedOrder(), []
    for place, number in enumerate(order):
        now = agreed.ready(number)
        assert set(now) <= set(order[: place + 1]), f"{order}: launched before it was ready"
        launched += now
        missing = [n for n in order if n not in order[: place + 1]]
        assert launched == sorted(set(launched)), "launched twice, or not in the order 0, 1, 2, ..."
        due = list(range(min(missing, default=len(order))))
        said = f"with {order[: place + 1]} ready, {launched} are launched, and should be {due}"
        assert launched == due, said


def sums(exercise):
    tensors = [torch.tensor([10.0**number]) for number in range(5)]
    agreed, handles = exercise.AgreedOrder(), []
    order = list(range(5))
    random.Random(dist.get_rank()).shuffle(order)  # a different order on each rank
    for ready in order:
        for number in agreed.ready(ready):
            handles.append(dist.all_reduce(tensors[number], async_op=True))
    for handle in handles:
        handle.wait()
    return [tensor.item() for tensor in tensors]


def test_sums_are_right_whatever_the_ranks_orders(on_ranks):
    for rank, found in enumerate(on_ranks(3, sums)):
        said = f"rank {rank}: a launch met another rank's launch of another tensor"
        assert found == [3, 30, 300, 3000, 30000], said
