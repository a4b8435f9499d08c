"""Waits for a collective, with and without ranks that may be lost."""

from datetime import timedelta

import pytest

from ddp_from_scratch import waiting
from ddp_from_scratch.errors import CommunicationError


class Work:
    """A collective that ends while it is waited for the `ends`-th time, or never."""

    def __init__(self, ends: int | None, error: RuntimeError | None = None) -> None:
        self._ends, self._error = ends, error
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits.append(timeout)
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._ends is not None and len(self.waits) >= self._ends


@pytest.fixture(autouse=True)
def ends_with_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_is_broken", None)


def test_a_late_rank_is_waited_for_only_where_ranks_may_be_lost():
    work = Work(ends=1)
    waiting.wait(work)
    assert work.waits == [None]
    assert not waiting.may_be_left_behind()
    waiting.look_for_lost_ranks(lambda: False)
    work = Work(ends=3)
    waiting.wait(work)
    assert len(work.waits) == 3
    assert None not in work.waits
    assert waiting.may_be_left_behind()


def test_a_lost_rank_ends_the_wait():
    answers = iter([False, True])
    waiting.look_for_lost_ranks(lambda: next(answers))
    work = Work(ends=None)
    with pytest.raises(CommunicationError, match="a rank of the group was lost"):
        waiting.wait(work)
    assert len(work.waits) == 2
