"""The process of a rank: it ends with its parent and prints an error once."""

import atexit
import ctypes
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ddp_from_scratch.common.errors import (
    CommunicationError,
    PeerError,
    UsageError,
    WrongResultError,
)
from ddp_from_scratch.common.log import logger
from ddp_from_scratch.common.process import Process
from ddp_from_scratch.launch import ancestors, environment
from ddp_from_scratch.launch.claim import inherited_from

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Ends this rank soon after its launcher, or a wrapper between the two, has exited. Linux only.

    The kernel kills a direct child of the launcher. Behind a wrapper (`timeout 60 python train.py`)
    a thread also watches the launcher, and says why the rank ends.
    """
    starter = Process.parse(os.environ.get(environment.PARENT, ""))
    # Without a launcher to wait for it, a rank started by hand may outlive its shell.
    launched = environment.launcher() == "mpirun" or "TORCHELASTIC_RUN_ID" in os.environ
    if not sys.platform.startswith("linux") or not (starter or launched):
        return
    parent = os.getppid()
    watched = {Process.of(pid) for pid in (parent, ancestors.launcher()) if pid}
    if starter is not None and starter.is_visible:
        watched.add(starter)
    # The kernel sends the signal when the *thread* ends that has started this process.
    if len(watched) < 2 or ancestors.number_of_threads(parent) == 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Checked afterwards: a parent that exited before the call has sent no signal.
    for process in watched:
        if not process.is_alive():
            _end_without(process)
    if len(watched) > 1:
        threading.Thread(target=_watch, args=[watched], name="ddp-launcher", daemon=True).start()


_LOOK_S = 0.5


def _watch(watched: set[Process]) -> None:
    while True:
        time.sleep(_LOOK_S)
        for process in watched:
            if not process.is_alive():
                _end_without(process)


def _end_without(starter: Process) -> NoReturn:
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    rank = next((os.environ[name] for name in names if name in os.environ), "?")
    text = f"rank {rank} was ended: process {starter.pid}, which started it, is gone\n"
    # Not through `sys.stderr`: the main thread may hold its lock. A full pipe would block.
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be ignored")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent exits. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # Checked afterwards: a parent that exited before the call has sent no signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_to_exit(main: Callable[[], int]) -> NoReturn:
    """Calls `main` and exits with the code that it returns.

    ====================  ====  ================================================================
    what `main` did       code  what is printed
    ====================  ====  ================================================================
    returned n            n     nothing
    raised UsageError     2     its one line
    KeyboardInterrupt     130   nothing
    any other exception   1     the traceback
    ====================  ====  ================================================================
    """
    code, text = 1, ""
    try:
        code = main()
    except PeerError:
        code = 2
    except UsageError as error:
        # Inside a group the ranks have agreed on who reports. Before that, most have one error: the
        # first rank reports it, and its exit ends the others. A rank alive after 5 s has its own.
        others = _place()[1] == 1 and not environment.reports_errors()
        if others and inherited_from() is None:
            time.sleep(5.0)
        code, text = 2, f"error: {_printable(str(error))}"
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:  # argparse's --help
        code = end.code if isinstance(end.code, int) else 1
    except Exception as error:  # noqa: BLE001  # whatever it is, it ends this process
        text = _report_of(error)
    if text:
        colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        flush(sys.stderr, f"\033[31m{text}\033[0m\n" if colour else f"{text}\n")
        _tell_torchrun(text)
    flush(sys.stdout)
    flush(sys.stderr)
    if code:
        os._exit(code)  # the destructors of MPI and gloo wait for peers, which wait for this rank
    # MPI is finalised when Python tears down its modules.
    if environment.launcher() != "none" and "mpi4py" not in sys.modules:
        _end()
    sys.exit(0)


def _tell_torchrun(text: str) -> None:
    """Writes the cause to the file from which torchrun's report takes it, which comes last."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    last = {"message": text.splitlines()[-1], "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": last}))


def _report_of(error: Exception) -> str:
    """Returns what is printed of an error that ends this rank, once this rank is to print it."""
    rank = _place()[0]
    if is_communication_error(error):
        # The failed peer reports the error, and its launcher stops this process meanwhile. If all
        # ranks notice at once (a timeout), the lowest rank reports first.
        time.sleep(2.0 + 0.2 * min(rank, 10))
        if isinstance(error, WrongResultError):
            return f"error: {error}"
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return f"error: rank {rank} lost the other ranks: {first}"
    if isinstance(error, WrongResultError):
        return f"error: {error}"
    if _is_of_backend(error):
        return f"error: rank {rank}: {_printable(_cause(str(error)))}"
    lines = "".join(traceback.format_exception(error)).splitlines(keepends=True)
    return "".join(f"[rank {rank}] {line}" for line in lines).rstrip("\n")


def _end() -> NoReturn:
    """Exits as Python does, but without tearing down modules and objects.

    In a forked rank the teardown would copy every page of torch's objects: half a second of CPU
    time. Only our own program may: another one may have a file that is not written out yet.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins all non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        flush(stream)
    os._exit(0)


def is_communication_error(error: Exception) -> bool:
    """True for an error that only says that another rank is gone, which has reported why itself.

    gloo and NCCL have no class of their own for such errors.
    """
    # gloo raises plain RuntimeErrors that begin with a place in its source, except after a timeout.
    said_by_gloo = r"\[[^]]*/gloo/|Gloo |Application timeout caused pair closure"
    if isinstance(error, RuntimeError) and re.match(said_by_gloo, str(error)):
        return True
    if _is_of_backend(error):
        # All other NCCL errors are this rank's own: out of memory, a full /dev/shm, an old driver.
        gone = r"(?i)remote *(error|process|peer)|aborted|connection (closed|reset)|broken pipe"
        return re.search(gone, str(error)) is not None
    dist = _distributed()
    known = (CommunicationError, dist.DistError) if dist else CommunicationError
    return isinstance(error, known)


def _is_of_backend(error: Exception) -> bool:
    dist = _distributed()
    return dist is not None and isinstance(error, dist.DistBackendError)


def _cause(text: str) -> str:
    """Extracts what failed and why, in NCCL's words, from torch's error."""
    what, _, last = text.partition("Last error:")
    what = re.sub(r"NCCL error in: \S+, ", "NCCL: ", what.strip().partition("\n")[0])
    last = " ".join(last.split()).removeprefix("Error: ")
    return f"{what}. Last error: {last}" if last else what


def _distributed() -> Any:
    # A process that only starts ranks never imports it: the import takes longer than all its work.
    return sys.modules.get("torch.distributed")


def _place() -> tuple[int, int]:
    """Returns this rank and the size of its group; before there is a group, the size is 1."""
    dist = _distributed()
    if dist is not None and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    with suppress(UsageError):
        return environment.placement().rank, 1
    return 0, 1


def _printable(text: str) -> str:
    """Escapes what is not printable, so that a text with user input stays on one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(text: str) -> None:
    """Logs a line, by default to standard error (`common/log.py`)."""
    logger.info(text)


def replace_closed_streams() -> None:
    """Opens /dev/null for each closed standard stream (`>&-`)."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # /dev/null gets the stream's file descriptor, or the next file would, with all output.
            stream = open(os.devnull, "r+")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def flush(stream: TextIO, text: str = "") -> None:
    """Writes the text and flushes the buffer; redirects the stream to /dev/null if that fails."""
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        # At the stream's own file descriptor: Python's next flush of the buffer then succeeds.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        if stream is sys.stdout:
            why = f"warning: standard output cannot be written to ({error.strerror})"
            say(f"{why}: continuing without")
