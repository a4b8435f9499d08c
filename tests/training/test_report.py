"""training/report.py: what is written where."""

import io
import sys

import pytest

from ddp_from_scratch.training.report import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(
    stderr: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    *,
    speaks: bool = True,
    quiet: bool = False,
) -> str:
    monkeypatch.setattr(sys, "stderr", stderr)
    report = Report(speaks=speaks, quiet=quiet)
    assert list(report.progress(range(3), "epoch 1/1")) == [0, 1, 2]
    return stderr.getvalue()


def test_a_bar_is_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "epoch 1/1: " in written(Terminal(), monkeypatch)
    assert written(Terminal(), monkeypatch, quiet=True) == ""
    assert written(Terminal(), monkeypatch, speaks=False) == ""
    # mpirun was started on a terminal, with standard error redirected: only the output is there.
    monkeypatch.setenv("DDP_TERMINAL_1", "/dev/null")
    monkeypatch.setenv("DDP_TERMINAL", "1")
    assert written(io.StringIO(), monkeypatch) == ""
