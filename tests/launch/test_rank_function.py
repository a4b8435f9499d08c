"""`start_ranks` with a function: of a module, of a program's main file, of a notebook."""

import re
import sys
import threading
from functools import partial

import pytest

from ddp_from_scratch import UsageError, process_group, start_ranks
from ddp_from_scratch.launch.rank_function import command_of
from tests.support.failing_run import Run
from tests.support.tiers import slow


def fail(error):
    with process_group("gloo") as world:
        if world.rank == 1:
            raise error
        threading.Event().wait()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("no such data"), 2, "error: no such data\n"),
        slow(ValueError("mine"), 1, "ValueError: mine"),
    ],
)
def test_a_function_that_raises_ends_all_ranks(error, code, told, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # a module's function needs none
    assert start_ranks(partial(fail, error), [3]) == code
    said = capfd.readouterr().err
    assert said == told if code == 2 else said.count(told) == 1


def mistaken():
    raise UsageError("no such data")


@pytest.mark.slow
def test_a_mistake_before_ranks_meet_is_one_line(capfd):
    # With `max_failures` each rank begins in a group of its own.
    assert start_ranks(mistaken, [2], max_failures=3) == 2
    assert capfd.readouterr().err == "error: no such data\n"


class Refuses:
    def __reduce__(self):
        raise RuntimeError("between processes only through inheritance")


def steps():
    yield 1


async def wait():
    return


NOT_RUN = r"start_ranks\((steps|wait)\): .* does not run it"
NO_RANK = "counts must be 1 or more for each machine, got "
FAILURES = "max_failures must be 0 to 50,000, got "


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (partial(fail, threading.Lock()), {}, r"start_ranks\(fail\): .* cannot be sent .*lock"),
        (partial(fail, Refuses()), {}, "cannot be sent .* only through inheritance"),
        *((function, {}, NOT_RUN) for function in (steps, wait, partial(steps))),
        *((mistaken, {"counts": counts}, NO_RANK) for counts in ([], [0], [1, -1])),
        *((mistaken, {"max_failures": n}, FAILURES) for n in (-1, 50_001)),
    ],
)
def test_what_cannot_be_started_is_refused(function, options, told):
    with pytest.raises(UsageError, match=told):
        start_ranks(function, **{"counts": [1]} | options)


def test_a_function_of_the_program_itself_needs_cloudpickle(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(fail, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"start_ranks\(fail\): .* pip install cloudpickle"):
        command_of(partial(fail, tmp_path), tmp_path)


def test_another_thread_than_the_main_one_is_refused():
    raised = []

    def call():
        try:
            start_ranks(mistaken, [1])
        except UsageError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call, name="worker 7")
    thread.start()
    thread.join()
    (told,) = raised
    assert re.fullmatch("start_ranks must be called in the main thread, .*, got worker 7", told)


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
