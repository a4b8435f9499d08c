"""Waits for a collective, with and without ranks that may be lost."""

import pytest

from ddp_from_scratch import waiting
from ddp_from_scratch.errors import CommunicationError


class Work:
    """A collective that ends while it is waited for the `ends`-th time."""

    def __init__(self, ends):
        self._ends, self.waits = ends, []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return len(self.waits) >= self._ends


def test_a_late_rank_is_waited_for_only_where_ranks_may_be_lost(monkeypatch):
    monkeypatch.setattr(waiting, "_is_broken", None)
    work = Work(ends=1)
    waiting.wait(work)
    assert work.waits == [None]
    assert not waiting.may_be_left_behind()
    answers = iter([False] * 3 + [True])
    waiting.look_for_lost_ranks(lambda: next(answers))
    work = Work(ends=3)
    waiting.wait(work)
    assert len(work.waits) == 3
    assert None not in work.waits
    assert waiting.may_be_left_behind()
    with pytest.raises(CommunicationError, match="a rank of the group was lost"):
        waiting.wait(Work(ends=3))
