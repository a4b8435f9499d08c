import pytest

COUNTS = [4, 2, 3]
PLACES = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_rank_of(exercise):
    assert [exercise.rank_of(COUNTS, *place) for place in PLACES] == list(range(9))


def test_place_of(exercise):
    assert [tuple(exercise.place_of(COUNTS, rank)) for rank in range(9)] == PLACES


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("4(x2),3", [4, 4, 3]), ("1,16(x3)", [1, 16, 16, 16]), ("10(x1),2", [10, 2])],
)
def test_counts_of(exercise, text, counts):
    assert list(exercise.counts_of(text)) == counts
