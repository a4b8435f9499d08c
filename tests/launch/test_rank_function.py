"""`start_ranks` with a function: of a module, of a program's main file, of a notebook."""

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ddp_from_scratch import UsageError, start_ranks
from ddp_from_scratch.launch.start import _command_of
from tests.support.failing_run import Run


def mistaken(why=None):
    raise UsageError("no such data")


def test_another_thread_than_the_main_one_is_refused():
    with ThreadPoolExecutor(1, "worker") as pool, pytest.raises(UsageError) as raised:
        pool.submit(start_ranks, mistaken, [1]).result()
    assert re.fullmatch(".* must be called in the main thread, .*, got worker_0", str(raised.value))


NO_RANK = "counts must be 1 or more for each machine, got "
FAILURES = "max_restarts must be 0 to 50,000, got "


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (partial(mistaken, threading.Lock()), {}, r".*\(mistaken\): .* cannot be sent .*lock"),
        *((mistaken, {"counts": counts}, NO_RANK) for counts in ([], [0], [1, -1])),
        *((mistaken, {"max_restarts": n}, FAILURES) for n in (-1, 50_001)),
    ],
)
def test_what_cannot_be_started_is_refused(function, options, told):
    with pytest.raises(UsageError, match=told):
        start_ranks(function, **{"counts": [1]} | options)


def test_a_function_of_the_program_itself_needs_cloudpickle(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(mistaken, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"start_ranks\(mistaken\): .* pip install cloudpickle"):
        _command_of(partial(mistaken, tmp_path), tmp_path)


PROGRAM = """
import sys
import ddp_from_scratch as ddp

ANSWER = 42

def train():
    with ddp.process_group("gloo") as world:
        # One write: with PYTHONUNBUFFERED the line's end would be a second one.
        print(f"rank {world.rank}: {ANSWER}, {more}, {sys.argv[1:]}\\n", end="", flush=True)

if __name__ == "__main__":
    for more in "ab":  # a closure is sent with what it uses
        assert ddp.start_ranks(lambda: train(), [2]) == 0
"""


@pytest.mark.slow
def test_a_program_may_call_it_twice(tmp_path):
    pytest.importorskip("cloudpickle")
    (tmp_path / "program.py").write_text(PROGRAM)
    with Run(sys.executable, tmp_path / "program.py", "--lr=1") as run:
        assert run.wait() == 0, run.text
        said = [f"rank {rank}: 42, {more}, ['--lr=1']" for rank in "01" for more in "ab"]
        assert sorted(run.out.splitlines()) == said
        assert run.err == ""
