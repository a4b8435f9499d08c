from importlib import import_module

import pytest

program = import_module("tutorial.18_streams.streams")


@pytest.mark.parametrize(
    ("backward", "send", "end"),
    [
        ([3, 3, 3, 3], [2, 2, 2, 2], 14),
        ([1, 1, 1], [4, 4, 4], 13),
        ([5, 1, 1], [4, 4, 1], 14),
        ([2], [1], 3),
    ],
)
def test_end_of_overlap(exercise, backward, send, end):
    assert exercise.end_of_overlap(backward, send) == pytest.approx(end), (
        f"layers take {backward}, and their sums {send}"
    )


@pytest.mark.parametrize(("backward", "send"), [(3.0, 2.0), (1.0, 4.0)])
def test_end_of_overlap_is_the_programs(exercise, backward, send):
    _, _, nccl, _ = program.run(program.overlap, 0.0, backward, send)
    layers = program.LAYERS
    assert exercise.end_of_overlap([backward] * layers, [send] * layers) == pytest.approx(nccl.end)


BACKWARD = [("run", "compute", "a"), ("record", "compute", 1), ("wait", "nccl", 1)]
SUM = [("run", "nccl", "a"), ("record", "nccl", 2)]
WAIT, STEP = ("wait", "compute", 2), ("run", "compute", "a")


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([*BACKWARD, *SUM, WAIT, STEP], []),
        ([*BACKWARD, *SUM, STEP, WAIT], ["a"]),
        ([BACKWARD[0], *SUM, WAIT, STEP], ["a"]),  # NCCL does not wait for backward
        ([BACKWARD[1], BACKWARD[0], BACKWARD[2], *SUM, WAIT, STEP], ["a"]),  # recorded too early
        ([*BACKWARD, SUM[1], SUM[0], WAIT, STEP], ["a"]),
        ([*BACKWARD, *SUM, ("run", "compute", "b"), WAIT, STEP], []),  # another tensor
        ([("run", "compute", "b"), *BACKWARD, *SUM, ("run", "nccl", "b"), STEP], ["a"]),
        ([("run", "nccl", "b"), ("run", "compute", "b"), *SUM, STEP, STEP], ["b", "a"]),
    ],
)
def test_races(exercise, operations, expected):
    assert exercise.races(operations) == expected, operations
