"""`start_ranks` with a function: of a module, of a program's main file, of a notebook."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_from_scratch import UsageError, process_group, start_ranks
from ddp_from_scratch.launch.rank_function import command_of
from tests.support.failing_run import Run


def note(folder: Path, more: str = "") -> None:
    """Of this module, so it is sent by its name."""
    with process_group("gloo") as world:
        (folder / f"{world.rank} of {world.world_size}{more}").touch()


def named(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_function_runs_on_every_rank(tmp_path: Path) -> None:
    assert start_ranks(partial(note, tmp_path), [2]) == 0
    assert named(tmp_path) == ["0 of 2", "1 of 2"]


@pytest.mark.slow
def test_a_function_of_a_module_needs_no_cloudpickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert start_ranks(partial(note, tmp_path), [1]) == 0
    assert named(tmp_path) == ["0 of 1"]


@pytest.mark.slow
def test_a_closure_is_sent_with_what_it_uses(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    more = ", later"
    assert start_ranks(lambda: note(tmp_path, more), [2]) == 0
    assert named(tmp_path) == ["0 of 2, later", "1 of 2, later"]


def fail() -> None:
    with process_group("gloo") as world:
        if world.rank == 1:
            raise ValueError("on purpose")
        threading.Event().wait()


@pytest.mark.slow
def test_a_function_that_raises_ends_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert start_ranks(fail, [3]) == 1
    assert capfd.readouterr().err.count("ValueError: on purpose") == 1


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"start_ranks\(note\): .* cannot be sent .*lock"):
        start_ranks(partial(note, threading.Lock()), [1])  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [[], [0], [1, -1]])
def test_each_machine_has_a_rank(tmp_path: Path, counts: list[int]) -> None:
    with pytest.raises(UsageError, match="counts must be 1 or more for each machine, got "):
        start_ranks(partial(note, tmp_path), counts)


class Refuses:
    def __reduce__(self) -> str:
        raise RuntimeError("between processes only through inheritance")


def test_an_object_may_refuse_with_any_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent .* only through inheritance"):
        start_ranks(partial(note, tmp_path, Refuses()), [1])  # type: ignore[arg-type]


def steps() -> Iterator[int]:
    yield 1


async def wait() -> None:
    return


@pytest.mark.parametrize("function", [steps, wait, partial(steps)])
def test_a_function_whose_call_would_not_run_it(function: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"start_ranks\((steps|wait)\): .* does not run it"):
        start_ranks(function, [1])


def test_a_function_of_the_program_itself_needs_cloudpickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(note, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"start_ranks\(note\): .* pip install cloudpickle"):
        command_of(partial(note, tmp_path), tmp_path)


PROGRAM = """
import sys
import ddp_from_scratch as ddp

ANSWER = 42

def train():
    with ddp.process_group("gloo") as world:
        # One write: with PYTHONUNBUFFERED the line's end would be a second one.
        print(f"rank {world.rank}: {ANSWER}, {sys.argv[1:]}\\n", end="", flush=True)

if __name__ == "__main__":
    for _ in range(2):
        assert ddp.start_ranks(train, [2]) == 0
"""


@pytest.mark.slow
def test_a_program_may_call_it_twice(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "program.py").write_text(PROGRAM)
    with Run(sys.executable, tmp_path / "program.py", "--lr=1") as run:
        assert run.wait() == 0, run.text
        assert sorted(run.out.splitlines()) == [f"rank {r}: 42, ['--lr=1']" for r in (0, 0, 1, 1)]
        assert run.err == ""
