"""Forks ranks from a process that has imported torch, so that all ranks share one import.

    agent --exec--> fork server          fresh: one thread, no CUDA context
        |                    | imports torch
        |   commands ->      |--fork--> rank 0: runs the command as a new Python would
        |   <- exit codes    `--fork--> rank 1

The server is a separate process, so ranks inherit nothing from the caller: no thread, lock, file,
random state or CUDA context. Linux only.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType, ModuleType, TracebackType

from ddp_from_scratch.common.process import Process
from ddp_from_scratch.launch import debugging
from ddp_from_scratch.launch.cores import bind_to
from ddp_from_scratch.launch.environment import CPUS, PARENT
from ddp_from_scratch.launch.output import OUTPUT, connect
from ddp_from_scratch.launch.rank_process import die_with

# torch's optimizers import this at their first call; it takes as long as importing torch.
OPTIMIZERS = "torch._dynamo"

# The server imports this package from the caller's path and removes that path for its ranks.
_PACKAGES = str(Path(__file__).parents[2])
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import serve; serve()"


def can_fork(command: Sequence[str]) -> bool:
    """True if ranks that run `command` can be forked: this Python, a script, -m or -c, Linux."""
    if not hasattr(os, "pidfd_open") or len(command) < 2 or command[0] != sys.executable:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel older than 5.3
        return False
    if command[1] in ("-m", "-c"):
        return len(command) > 2
    return Path(command[1]).is_file()


class RemoteRank:
    """A rank that another process starts, with the part of `subprocess.Popen` that agents need.

    `read` reads the reports of that process, and `send` has it send a signal.
    """

    def __init__(self, read: Callable[[], None], send: "Callable[[RemoteRank, int], None]") -> None:
        self._read, self._send = read, send
        self.pid: int | None = None  # None before the fork, and on another machine
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._read()
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._send(self, number)


class ForkServer:
    """The caller's end of a fork server, which imports torch and `preload` before any fork."""

    def __init__(
        self,
        preload: Sequence[str] = (OPTIMIZERS,),
        keep_stdin: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._connection, theirs = Pipe()
        self._ranks: list[RemoteRank] = []
        # The server's exit code if it has exited before its ranks (-N after signal N), else None.
        self.returncode: int | None = None
        with theirs:  # closes this copy, which would hide the end of file when the server dies
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _SERVE.format(__name__), _PACKAGES),
                    *(str(theirs.fileno()), str(os.getpid()), *preload),
                ],
                stdin=None if keep_stdin else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | variables,  # torch reads OMP_NUM_THREADS when it is imported
                start_new_session=True,  # the agent forwards the terminal's Ctrl-C
            )

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> RemoteRank:
        """Requests a rank. Waits neither for it nor for the server's imports."""
        with suppress(OSError):  # `_read` notices a server that has exited
            self._connection.send((len(self._ranks), list(command), dict(environ)))
        self._ranks.append(RemoteRank(self._read, self._send))
        return self._ranks[-1]

    def kill(self) -> None:
        """Ends the server, and with it the ranks that still run. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _read(self) -> None:
        try:
            while self._connection.poll():
                index, pid, code = self._connection.recv()
                rank = self._ranks[index]
                rank.pid = pid
                if rank.returncode is None:
                    rank.returncode = code
        except (EOFError, OSError):
            # Ranks end with their server, which ends first if it is killed or an import fails.
            self.returncode = self._process.wait() or -signal.SIGKILL
            for rank in self._ranks:
                if rank.returncode is None:
                    rank.returncode = self.returncode

    def _send(self, rank: RemoteRank, number: int) -> None:
        if rank.pid is not None:
            os.kill(rank.pid, number)
            return
        # The server may fork at this moment, or import for seconds, and others need it.
        rank.returncode = -number
        with suppress(OSError):  # `_read` notices a server that has exited
            self._connection.send((self._ranks.index(rank), None, None))


# In the server -----------------------------------------------------------------------------------


def serve() -> None:
    """Forks a rank for each command until the caller is gone; runs the command in the rank."""
    path, file, caller, *preload = sys.argv[1:]
    connection = Connection(int(file))
    # A rank that calls `exec` must not inherit the connection.
    os.set_inheritable(connection.fileno(), False)
    die_with(int(caller))  # before the imports, which take seconds
    for name in ("torch", *preload):
        import_module(name)
    sys.path.remove(path)
    gc.collect()  # later it would write to, and so copy, torch's pages in every rank
    gc.freeze()
    _run(_serve(connection))


def _serve(connection: Connection) -> list[str]:
    """Forks ranks. Returns the command in each rank, and never returns in the server."""
    running: dict[int, tuple[int, int]] = {}  # pidfd: the caller's index and the process id
    safe = _can_run_in_a_fork()
    while True:
        for file in wait([connection, *running]):
            if isinstance(file, int):
                index, pid = running.pop(file)
                os.close(file)
                # A zombie keeps its process id, so the caller's signal reaches no other process.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert ended is not None, "not WNOHANG"
                exited = ended.si_code == os.CLD_EXITED
                code = ended.si_status if exited else -ended.si_status
                connection.send((index, pid, code))
                continue
            try:
                index, command, environ = connection.recv()
            except EOFError:
                os._exit(0)
            if command is None:  # the request for this rank is withdrawn
                for pid in [pid for other, pid in running.values() if other == index]:
                    os.kill(pid, signal.SIGKILL)
                continue
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                # A copy of the connection in a rank would hide the server's exit from the caller.
                connection.close()
                for other in running:
                    os.close(other)
                _begin_rank(server, environ)
                if safe:
                    return list(command)
                os.execv(command[0], command)
            connection.send((index, pid, None))
            running[os.pidfd_open(pid)] = (index, pid)


def _can_run_in_a_fork() -> bool:
    """False if a preloaded module has started a thread or CUDA, which do not survive a fork."""
    from ddp_from_scratch.common import gpu

    # OpenBLAS's threads do not count: it ends them before a fork and restarts them when needed.
    trial = os.fork()
    if trial == 0:
        os._exit(gpu.is_in_bad_fork())
    _, status = os.waitpid(trial, 0)
    try:
        return len(os.listdir("/proc/self/task")) == 1 and status == 0
    except OSError:  # no /proc: not known
        return False


def _begin_rank(server: int, environ: dict[str, str]) -> None:
    die_with(server)
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    bind_to(environ.get(CPUS, ""))  # before the rank starts a thread
    if PARENT in environ:
        os.environ[PARENT] = str(Process.of(server))
    if not debugging.has_stdin(environ):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    if OUTPUT in environ:
        connect(os.environ.pop(OUTPUT))
        for stream in (sys.stdout, sys.stderr):  # a killed rank has no time to flush
            stream.reconfigure(write_through=True, line_buffering=True)  # type: ignore[union-attr]
    atexit.register(gc.unfreeze)  # or triton's classes count as leaked
    # Python reseeds its own generator at a fork, and torch's is the same in every new process.
    if "numpy" in sys.modules:
        import_module("numpy.random").seed()


def _run(command: list[str]) -> None:
    """Runs a command as the interpreter would: `python -m NAME`, `python -c TEXT` or a file."""
    sys.orig_argv = command
    sys.excepthook = _print_traceback
    kind, *rest = command[1:]
    folder = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    if not sys.flags.safe_path:
        sys.path[0] = folder
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    # A new module, because the server's `__main__` has names that the command's has not.
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv = [kind, *rest]
        main.__file__ = os.path.abspath(kind)
        code = compile(Path(kind).read_bytes(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _print_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    while traceback is not None and traceback.tb_frame.f_code is not _run.__code__:
        traceback = traceback.tb_next
    traceback = traceback and traceback.tb_next
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == "runpy":
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)
