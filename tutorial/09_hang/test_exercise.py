import pytest
import torch
import torch.distributed as dist


@pytest.mark.parametrize(
    ("report", "rank"),
    [
        ("late_by_py_spy", 2),
        ("late_by_stall_after", 3),
        ("other_by_comparison", 2),
        ("skipped_by_flight_recorder", 1),
    ],
)
def test_the_rank(exercise, report, rank):
    found = getattr(exercise, report)()
    if found != rank:  # an assert would print the answer
        pytest.fail(f"not rank {found}. Read once more: which rank does not do as the others do?")


def answers(exercise):
    rank = dist.get_rank()
    return [exercise.all_can(can) for can in (True, rank != 1, rank == 1, False)]


def test_all_can(on_ranks):
    for rank, found in enumerate(on_ranks(3, answers)):
        said = f"rank {rank}'s answers, if all can, only rank 1 cannot, only rank 1 can, none can"
        assert found == [True, False, False, False], said


def uneven(exercise):
    used = []

    def step(batch):
        dist.all_reduce(torch.ones(1))
        used.append(batch)

    exercise.train(["a", "b", "c", "d", "e"][: 5 - 2 * dist.get_rank()], step)
    try:
        dist.barrier()
    except RuntimeError as error:
        said = "a rank has left `train` before the other: does each rank ask equally often?"
        raise AssertionError(said) from error
    return used


def test_train(on_ranks):
    for rank, used in enumerate(on_ranks(2, uneven)):
        said = f"rank {rank} had the batches a to {'ec'[rank]}; all have three"
        assert used == ["a", "b", "c"], said
