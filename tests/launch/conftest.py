"""Signals as a terminal's programs have them."""

import signal

import pytest


@pytest.fixture(autouse=True)
def sighup_is_not_ignored():
    """Under nohup it is, and what a test starts would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
