"""Makes a command of a function, so that `start_ranks` can run it in the ranks' processes."""

import inspect
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.rank_process import run_to_exit

# The caller's path first: the function's modules are found through it. And its arguments, which the
# function may parse.
_CALL = (
    "import pickle, sys; path, sys.argv, function = pickle.load(open(sys.argv[1], 'rb')); "
    f"sys.path[:] = path; from {__name__} import call; call(function)"
)


def command_of(function: Callable[[], Any], folder: Path) -> list[str]:
    """Writes the function to a file in `folder`; returns a command that reads and calls it.

    A function of `__main__`, such as a notebook's, is written with its code and what it uses, by
    cloudpickle; others by name.

    Raises:
        UsageError: it needs cloudpickle, which is not installed, holds what cannot be pickled, or
            is a generator or coroutine function.
    """
    name = _named(function)
    inner = _inner(function)
    if inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner):
        raise UsageError(
            f"start_ranks({name}): a call of a generator or coroutine function does not run it; "
            f"call it in a function that uses what it yields, or asyncio.run"
        )
    try:
        from cloudpickle import dumps
    except ImportError:
        if inner.__module__ == "__main__":
            raise UsageError(
                f"start_ranks({name}): a function of a notebook or of the program itself needs "
                f"cloudpickle: pip install cloudpickle, or put the function into a module"
            ) from None
        dumps = pickle.dumps
    try:
        written = dumps(function)
    except Exception as error:  # whatever an object raises that cannot be copied
        raise UsageError(
            f"start_ranks({name}): the function or what it uses cannot be sent to a process: "
            f"{error}; make that inside the function"
        ) from error
    file = folder / "function"
    file.write_bytes(pickle.dumps((sys.path, sys.argv, written)))
    return [sys.executable, "-c", _CALL, str(file)]


def call(written: bytes) -> None:
    """Calls the function in a rank. A UsageError ends the rank as `run_to_exit` does."""
    try:
        pickle.loads(written)()
    except UsageError as error:
        run_to_exit(partial(_raise, error))


def _raise(error: UsageError) -> NoReturn:
    raise error


def _inner(function: Callable[[], Any]) -> Any:
    return _inner(function.func) if isinstance(function, partial) else function


def _named(function: Callable[[], Any]) -> str:
    inner = _inner(function)
    return str(getattr(inner, "__name__", type(inner).__name__))
