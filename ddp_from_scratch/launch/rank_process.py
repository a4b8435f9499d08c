"""A rank's own process: it ends with its parent, at once, and prints its message once."""

import atexit
import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from ddp_from_scratch.errors import CommunicationError, PeerError, UsageError
from ddp_from_scratch.launch import environment

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the system kill this rank when its launcher is gone. Linux only."""
    parent = os.environ.get(environment.PARENT)
    # Not where no launcher waits for its ranks: one started by hand may outlive its shell.
    launched = environment.launcher() == "mpirun" or "TORCHELASTIC_RUN_ID" in os.environ
    if not sys.platform.startswith("linux") or (parent is None and not launched):
        return
    die_with(os.getppid() if parent is None else int(parent))


def die_with(parent: int) -> None:
    """Has the system kill this process when its parent is gone. Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Looked up after and not before: a parent that ended in between has sent no signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def write_to_terminal() -> None:
    """Has a rank of `start_mpirun` print to its terminal directly. A no-op elsewhere."""
    # mpirun holds a line back until it is whole, and a progress bar never is.
    for stream in (1, 2):
        path = os.environ.get(f"{environment.TERMINAL}{stream}")
        if path is not None:
            with suppress(OSError):
                terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
                os.dup2(terminal, stream)
                os.close(terminal)


def run_to_exit(main: Callable[[], int]) -> NoReturn:
    """Calls `main` and ends the process with the code that it returns.

    ====================  ====  ================================================================
    what `main` did       code  what is printed
    ====================  ====  ================================================================
    returned n            n     nothing
    raised UsageError     2     its one line
    KeyboardInterrupt     130   nothing
    any other exception   1     the traceback
    ====================  ====  ================================================================

    A failing process ends without unwinding.
    """
    try:
        code = main()
    except PeerError:
        code = 2
    except UsageError as error:
        # Inside a group the ranks have agreed on who reports. Before it each is on its own, most
        # often with the same mistake: rank 0 reports, and its exit has the launcher stop the
        # others. One that is not stopped has a mistake of its own.
        if _place()[1] == 1 and not environment.reports_errors():
            time.sleep(5.0)
        _say(f"error: {_printable(str(error))}")
        code = 2
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:  # argparse's --help
        code = end.code if isinstance(end.code, int) else 1
    except Exception as error:  # noqa: BLE001  # whatever it is, it ends this process
        if is_communication_error(error):
            _wait_to_be_stopped()
            first = next(iter(str(error).splitlines()), type(error).__name__)
            _say(f"error: rank {_place()[0]} lost the other ranks: {first}")
        elif _is_of_backend(error):
            _say(f"error: rank {_place()[0]}: {_printable(_cause(str(error)))}")
        else:
            lines = "".join(traceback.format_exception(error)).splitlines(keepends=True)
            _say("".join(f"[rank {_place()[0]}] {line}" for line in lines))
        code = 1
    flush(sys.stdout)
    if code:
        # MPI and gloo would wait in their destructors for peers that wait for this one. The
        # launcher sees the code and stops the others.
        os._exit(code)
    # MPI is finalised where Python takes its modules apart.
    if environment.launcher() != "none" and "mpi4py" not in sys.modules:
        _end()
    sys.exit(0)


def _end() -> NoReturn:
    """Ends a process as Python does, but without taking its modules and objects apart.

    In a forked rank that would write to every page of torch's objects, which are shared until then:
    half a second of processor time for each rank. Only for our own program: another one may have
    left a file unwritten. Processes of `multiprocessing` end like this, too.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        flush(stream)
    os._exit(0)


def is_communication_error(error: Exception) -> bool:
    """True for an error that says only that some peer has gone. That one has said why."""
    # gloo's errors are plain RuntimeErrors that begin with the place in its source, but for one
    # that follows a timeout.
    said_by_gloo = r"\[[^]]*/gloo/|Gloo |Application timeout caused pair closure"
    if isinstance(error, RuntimeError) and re.match(said_by_gloo, str(error)):
        return True
    if _is_of_backend(error):
        return re.search(_PEER_GONE, str(error)) is not None
    dist = _distributed()
    return isinstance(error, (CommunicationError, *([dist.DistError] if dist else [])))


# All other errors of NCCL are this rank's own: no memory, a full /dev/shm, an old driver.
_PEER_GONE = r"(?i)remote *(error|process|peer)|aborted|connection (closed|reset)|broken pipe"


def _is_of_backend(error: Exception) -> bool:
    dist = _distributed()
    return dist is not None and isinstance(error, dist.DistBackendError)


def _cause(text: str) -> str:
    """What failed and why, in NCCL's words, from the text of torch's error."""
    what, _, last = text.partition("Last error:")
    what = re.sub(r"NCCL error in: \S+, ", "NCCL: ", what.strip().partition("\n")[0])
    last = " ".join(last.split()).removeprefix("Error: ")
    return f"{what}. Last error: {last}" if last else what


def _distributed() -> Any:
    # A process that only starts others never imports it: it takes longer than all they do here.
    return sys.modules.get("torch.distributed")


def _wait_to_be_stopped() -> None:
    # The peer that failed reports, and its launcher ends this process meanwhile. Where all ranks
    # notice at once (a timeout), the lowest reports first.
    time.sleep(2.0 + 0.2 * min(_place()[0], 10))


def _place() -> tuple[int, int]:
    """This rank's number in its group, and the group's size; before there is one, of itself."""
    dist = _distributed()
    if dist is not None and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    with suppress(UsageError):
        return environment.placement().rank, 1
    return 0, 1


def _printable(text: str) -> str:
    """Makes one line of a text, whatever the user's words have in them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _say(text: str) -> None:
    """Prints to standard error, in red where that is a terminal."""
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    text = text.rstrip("\n")
    write_line(f"\033[31m{text}\033[0m" if colour else text, sys.stderr)


# Standard output and error, which may be full, or a pipe that nobody reads any more --------------


def replace_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`)."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # It gets the lowest free number, so the stream's own. Else the next socket or file
            # would, and with it all that is printed.
            stream = open(os.devnull, "r+")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def write_line(text: str, stream: TextIO) -> None:
    """Prints a line at once, or nothing where that fails."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        give_up(stream, error)


def flush(stream: TextIO) -> None:
    """Writes out the buffer, or drops it where that fails."""
    try:
        stream.flush()
    except OSError as error:
        give_up(stream, error)


def give_up(stream: TextIO, error: OSError) -> None:
    """Sends the buffer, and all that follows, to /dev/null."""
    # Under the stream's number: Python's buffer goes there at the next flush, and fails no more.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    if stream is sys.stdout:
        text = (
            f"warning: standard output cannot be written to ({error.strerror}): continuing without"
        )
        write_line(text, sys.stderr)
