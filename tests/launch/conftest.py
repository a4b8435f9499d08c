"""Signals as a terminal's programs have them."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sighup_is_not_ignored() -> Iterator[None]:
    """Under nohup it is, and what a test starts would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
