"""What a run writes where."""

import io

from ddp_from_scratch.training.report import Report


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_for_a_terminal(monkeypatch):
    def written(stderr, speaks=True, quiet=False):
        monkeypatch.setattr("sys.stderr", stderr)
        report = Report(speaks=speaks, quiet=quiet)
        assert list(report.progress(range(3), "epoch 1/1")) == [0, 1, 2]
        return stderr.getvalue()

    assert "epoch 1/1: " in written(Terminal())
    assert written(Terminal(), quiet=True) == ""
    assert written(Terminal(), speaks=False) == ""
    # mpirun was started on a terminal, with standard error redirected: only the output is there.
    monkeypatch.setenv("DDP_TERMINAL_1", "/dev/null")
    monkeypatch.setenv("DDP_TERMINAL", "1")
    assert written(io.StringIO()) == ""
