"""Forks ranks from a process that has imported torch: starting many costs little more than one.

    agent --exec--> fork server          fresh: one thread, no CUDA context
        |                    | imports torch
        |   commands ->      |--fork--> rank 0: runs the command as a new Python would
        |   <- exit codes    `--fork--> rank 1

The server is a process of its own, so that ranks inherit nothing of the caller's: no thread, lock,
file, random state or CUDA context. Linux only.
"""

import atexit
import gc
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType

from ddp_from_scratch.launch.environment import PARENT
from ddp_from_scratch.launch.rank_process import die_with

# What torch's optimizers import at their first call, which takes as long as torch itself.
OPTIMIZERS = "torch._dynamo"

_PATIENCE_S = 0.5  # for a server to end by itself

# The server imports this package from where the caller did, and then forgets the path: a rank
# has the one that its own command would have.
_PACKAGES = str(Path(__file__).parents[2])
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import serve; serve()"


def can_fork(command: Sequence[str]) -> bool:
    """True where ranks that run `command` may be forked: this Python, a script, -m or -c, Linux."""
    if not hasattr(os, "pidfd_open") or len(command) < 2 or command[0] != sys.executable:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel before 5.3
        return False
    if command[1] in ("-m", "-c"):
        return len(command) > 2
    return Path(command[1]).is_file()


class ForkServer:
    """The caller's end of a fork server, which is started at once and ends with its caller.

    The server imports torch and the modules of `preload` before it forks the first rank.
    """

    def __init__(self, preload: Sequence[str] = (OPTIMIZERS,)) -> None:
        self._connection, theirs = Pipe()
        self._ranks: list[ForkedRank] = []
        # -N after signal N; None until it has ended before its ranks, as far as is known.
        self.returncode: int | None = None
        # `with`: while a copy of its end is open here, the server's death is no end of file.
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _SERVE.format(__name__), _PACKAGES),
                    *(str(theirs.fileno()), str(os.getpid()), *preload),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # The terminal's Ctrl-C is the agent's to pass on.
                start_new_session=True,
            )

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> "ForkedRank":
        """Asks for a rank. Does not wait for it, nor for the server's imports."""
        rank = ForkedRank(self)
        # A server that has ended is noticed in `receive`, as every rank's exit code.
        with suppress(OSError):
            self._connection.send((len(self._ranks), list(command), dict(environ)))
        self._ranks.append(rank)
        return rank

    def receive(self, timeout: float | None = 0.0) -> None:
        """Takes in the server's reports. Waits up to `timeout` seconds for the first."""
        try:
            while self._connection.poll(timeout):
                index, pid, code = self._connection.recv()
                rank = self._ranks[index]
                rank.pid = pid
                if rank.returncode is None:
                    rank.returncode = code
                timeout = 0.0  # the others have arrived already, or are not waited for
        except (EOFError, OSError):
            # Ranks end with their server. It ends before them where it is killed or cannot import.
            self.returncode = self._process.wait() or -signal.SIGKILL
            for rank in self._ranks:
                if rank.returncode is None:
                    rank.returncode = self.returncode

    def close(self) -> None:
        """Ends the server, whose ranks have ended. Idempotent."""
        self._connection.close()
        # It answers at once, unless it is still importing.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the server and all its ranks at once."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class ForkedRank:
    """A rank, as an `agent.Child`."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.pid: int | None = None  # until it has been forked
        self.returncode: int | None = None  # until it has ended, as far as is known

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.receive()
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._server.receive(None)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal; any signal ends a rank that is not forked yet, and its server."""
        if self.poll() is not None:
            return
        if self.pid is None:
            # The server would still fork it: there is no way to take the request back.
            self._server.kill()
            self.returncode = -number
        else:
            os.kill(self.pid, number)


# In the server -----------------------------------------------------------------------------------


def serve() -> None:
    """Forks a rank for each command that comes, until the caller is gone; runs it in the rank."""
    path, file, caller, *preload = sys.argv[1:]
    connection = Connection(int(file))
    # A rank that is executed, not run in the fork, must not get it.
    os.set_inheritable(connection.fileno(), False)
    # Before the imports, which take seconds.
    die_with(int(caller))
    for name in ("torch", *preload):
        import_module(name)
    sys.path.remove(path)
    # Collecting garbage would write to pages with torch's objects, and so copy them in every rank.
    gc.collect()
    gc.freeze()
    _run(_serve(connection))


def _serve(connection: Connection) -> list[str]:
    """Forks ranks. Returns in each of them, with its command, and never in the server."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the caller's index and the process id
    safe = _can_run_in_a_fork()
    while True:
        for file, _ in poller.poll():
            if file in running:
                index, pid = running.pop(file)
                poller.unregister(file)
                os.close(file)
                # Left a zombie until the server ends: its process id names no other process in the
                # meantime, so that the caller's signal cannot reach one.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert ended is not None, "not WNOHANG"
                exited = ended.si_code == os.CLD_EXITED
                code = ended.si_status if exited else -ended.si_status
                connection.send((index, pid, code))
                continue
            try:
                index, command, environ = connection.recv()
            except EOFError:
                # Their processor time now counts as this process's, and so as the caller's.
                with suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                os._exit(0)
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                # The server's alone: a copy here would keep the caller from seeing its end.
                connection.close()
                for other in running:
                    os.close(other)
                _begin_rank(server, environ)
                if safe:
                    return list(command)
                os.execv(command[0], command)
            connection.send((index, pid, None))
            file = os.pidfd_open(pid)
            running[file] = (index, pid)
            poller.register(file, select.POLLIN)


def _can_run_in_a_fork() -> bool:
    """False where a preloaded module has started a thread, or CUDA: a fork would lack its half."""
    from ddp_from_scratch import gpu

    # The threads of numpy's OpenBLAS are not counted: it ends them before each fork, such as this
    # one, and starts others when it needs them.
    trial = os.fork()
    if trial == 0:
        os._exit(gpu.is_in_bad_fork())
    _, status = os.waitpid(trial, 0)
    return len(os.listdir("/proc/self/task")) == 1 and status == 0


def _begin_rank(server: int, environ: dict[str, str]) -> None:
    die_with(server)
    os.setsid()  # Ctrl-C reaches it once, through the agent
    os.environ.clear()
    os.environ.update(environ)
    if PARENT in environ:
        os.environ[PARENT] = str(server)
    # The last collection finds them again, or triton's classes would count as leaked.
    atexit.register(gc.unfreeze)
    # Python's own generator is seeded at a fork, and torch's is the same in every new process.
    if "numpy" in sys.modules:
        import_module("numpy.random").seed()


def _run(command: list[str]) -> None:
    """Runs a command as its interpreter would: `python -m NAME`, `python -c TEXT` or a file."""
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
    # A new module: the server's own `__main__` has names that are not the command's.
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
    """Prints a traceback without the server's frames, with which each one begins here."""
    while traceback is not None and traceback.tb_frame.f_code is not _run.__code__:
        traceback = traceback.tb_next
    traceback = traceback and traceback.tb_next
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == "runpy":
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)
