"""Mistakes in programs that call `start_ranks`: each is one line, and none a traceback."""

import threading
from collections.abc import Callable

import pytest

from ddp_from_scratch import UsageError, process_group, start_ranks


def mistaken() -> None:
    raise UsageError("no such data")


def mistaken_in_a_group() -> None:
    with process_group("gloo") as world:
        if world.rank == 0:
            raise UsageError("no such data")
        threading.Event().wait()


# With `max_failures` each rank begins in a group of its own.
@pytest.mark.parametrize(
    ("function", "max_failures"), [(mistaken, None), (mistaken, 3), (mistaken_in_a_group, None)]
)
def test_a_usage_error_in_a_function_is_one_line(
    function: Callable[[], None], max_failures: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start_ranks(function, [2], max_failures=max_failures) == 2
    assert capfd.readouterr().err == "error: no such data\n"


def test_another_thread_than_the_main_one_is_refused() -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            start_ranks(mistaken, [1])
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=call, name="worker 7")
    thread.start()
    thread.join()
    (error,) = raised
    assert str(error) == (
        "start_ranks must be called in the main thread, the only one that may handle the signals "
        "that stop ranks, got worker 7"
    )
