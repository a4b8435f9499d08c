"""Starts the ranks of one machine: `python run.py`, one such command on each of several machines.

Used where no launcher is, and for mpirun. `agent.py` watches them.
"""

import ctypes
import fcntl
import inspect
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.agent import Agent, Child, say
from ddp_from_scratch.launch.elastic import ElasticAgent, FileStore, JobStore
from ddp_from_scratch.launch.fork_server import OPTIMIZERS
from ddp_from_scratch.launch.node_agent import Link, NodeAgent, arrive
from ddp_from_scratch.launch.nodes import Nodes
from ddp_from_scratch.launch.rank_process import PR_SET_PDEATHSIG, run_to_exit

if TYPE_CHECKING:
    import torch.distributed as dist

MAX_RESTARTS = 50_000
# What most programs of ranks import, beside torch.
_PRELOAD = ("ddp_from_scratch.world", "ddp_from_scratch.reducer", OPTIMIZERS)


def start_ranks(
    command: Sequence[str] | Callable[[], Any],
    counts: Sequence[int],
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 29500,
    timeout: float = 600.0,
    *,
    preload: Sequence[str] = _PRELOAD,
    max_restarts: int | None = None,
    asked: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs a command or a function once for each rank of this machine; waits for all of them.

    On one machine the ranks meet through a file that only this user can read, in a folder that is
    removed at the end: no port is opened. On several, machine 0 listens on `master_port` of
    `master_addr` and nowhere else, and talks to machines that know the job's secret: DDP_SECRET in
    the environment of all, or what machine 0 prints for the others where it has none.

    On Linux, ranks of `[sys.executable, "program.py", ...]`, or of -m or -c in its place, are
    forked from a process that has imported torch; any other command is executed.

    The first rank that fails ends all others, on every machine, unless `max_restarts` is given: the
    others then go on (`ddp.elastic`), and another process is started for it. Ctrl-C, SIGTERM,
    SIGUSR1 and SIGHUP reach the ranks as SIGTERM, and they stop together; a second Ctrl-C or
    SIGTERM kills them. SIGQUIT and SIGUSR2 end all ranks. SIGHUP that was ignored before (nohup)
    stays so.

    Args:
        command: program and arguments; each rank gets torchrun's variables in its environment. Or a
            function without arguments (`functools.partial` binds some), also of a notebook: it runs
            in new processes on copies of what it uses, and what it returns is dropped. A UsageError
            that it raises is printed as one line, and ends all ranks with code 2.
        counts: number of processes on each machine.
        node_rank: this machine's position in `counts`.
        master_addr: where machine 0 can be reached.
        master_port: the port that machine 0 listens on.
        timeout: seconds to wait for the other machines, and for a sign of life from them later.
        preload: modules that are imported once, before ranks are forked.
        max_restarts: processes that may be started in the place of failed ones (`elastic.py`), for
            programs with `ddp.elastic`. Machine 0's counts. None ends all ranks when one fails.
        asked: options, by name, that a machine that joins or rejoins must share.

    Returns:
        0 when every rank ended with 0, 128 + N after signal N, else the exit code of the first rank
        that did not end well (128 + N when it was killed by signal N).

    Raises:
        UsageError: the port is taken, machine 0 does not answer or refuses this machine, or the
            machines were given different counts or secrets; a function cannot be sent
            (see `_command_of`); a machine has no process; `max_restarts` is out of range;
            this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"start_ranks must be called in the main thread, the only one that may handle the "
            f"signals that stop ranks, got {threading.current_thread().name}"
        )
    if min(counts, default=0) < 1:
        raise UsageError(f"counts must be 1 or more for each machine, got {list(counts)}")
    if max_restarts is not None and not 0 <= max_restarts <= MAX_RESTARTS:
        raise UsageError(f"max_restarts must be 0 to {MAX_RESTARTS:,}, got {max_restarts}")
    elastic = max_restarts is not None
    nodes: Nodes | None = None
    link: Link | None = None
    with ExitStack() as stack:
        folder = stack.enter_context(_run_folder())
        if callable(command):
            command = _command_of(command, folder)
        common = {environment.PARENT: str(os.getpid()), environment.STARTED_HERE: "1"}
        store: FileStore | dist.Store = FileStore(folder)
        if len(counts) > 1:
            # Here and not above: it imports torch, which an agent on one machine does without.
            from ddp_from_scratch.launch.rendezvous import Rendezvous

            rendezvous = Rendezvous(node_rank, master_addr, master_port, timeout)
            stack.callback(rendezvous.close)
            store = rendezvous.store
            common |= rendezvous.environment
            if node_rank == 0:
                nodes = Nodes(store, counts, elastic, asked, timeout)
            else:
                link = Link(store, arrive(store, node_rank, counts, elastic, asked), timeout)
        else:
            common[environment.RENDEZVOUS_FILE] = str(folder / "rendezvous")
        if max_restarts is None:
            ranks = environment.rank_environments(counts, node_rank)
            here = range(len(ranks))
            return Agent(command, lambda at: common | ranks[at], here, preload, nodes or link).run()
        # Each process is alone in its world until its first generation.
        (alone,) = environment.rank_environments([1], 0)

        def environment_of(member: int) -> dict[str, str]:
            own = {
                environment.MEMBER: str(member),
                environment.RENDEZVOUS_FILE: str(folder / f"alone-{member}"),
            }
            return common | alone | own

        if link is not None:
            return NodeAgent(command, environment_of, link, preload).run()
        arguments = command, environment_of, counts, max_restarts, JobStore(store), preload, nodes
        return ElasticAgent(*arguments).run()


def start_mpirun(nproc: int, command: Sequence[str]) -> int:
    """Runs `mpirun -n NPROC COMMAND` on this machine and waits for it.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP reach the ranks as SIGUSR1; a second Ctrl-C ends them, and
    so do SIGQUIT and SIGUSR2.

    Returns:
        mpirun's exit code, which is that of the first rank that failed; 128 + N after signal N.

    Raises:
        UsageError: there is no mpirun, or no interface that it could use.
    """
    environment.require_loopback()
    full, defaults = environment.mpirun_command(nproc, command)
    defaults[environment.STARTED_HERE] = "1"
    for stream in (1, 2):
        if os.isatty(stream):
            defaults[f"{environment.TERMINAL}{stream}"] = os.ttyname(stream)
    say(f"starting: {shlex.join(full)}")
    return _MpirunAgent(full, lambda _: defaults | os.environ, range(1)).run()


class _MpirunAgent(Agent):
    """One child, mpirun, which watches the ranks itself."""

    # mpirun hands SIGUSR1 on and otherwise ignores it. At any other signal Open MPI kills its ranks
    # after 0.2 s, too early for them to have written a checkpoint, and has no setting for that.
    ladder = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)

    def _spawn(self, environ: dict[str, str]) -> Child:
        libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        return subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # mpirun cannot ask for it by itself, as ranks do in `die_with_parent`.
            preexec_fn=lambda: libc and libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )


# A function as a command --------------------------------------------------------------------------

# The caller's path first: the function's modules are found through it. And its arguments, which the
# function may parse.
_CALL = (
    "import pickle, sys; path, sys.argv, function = pickle.load(open(sys.argv[1], 'rb')); "
    f"sys.path[:] = path; from {__name__} import call; call(function)"
)


def _command_of(function: Callable[[], Any], folder: Path) -> list[str]:
    """Writes the function to a file in `folder`; returns a command that reads and calls it.

    A function of `__main__`, such as a notebook's, is written with its code and what it uses, by
    cloudpickle; others by name.
    """
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
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
        told = error

        def fail() -> NoReturn:
            raise told

        run_to_exit(fail)


# A private folder for the files of a run ----------------------------------------------------------

_PREFIX = "ddp-run-"
_NEW_S = 60.0  # a folder that is not older may not have been locked yet


@contextmanager
def _run_folder() -> Iterator[Path]:
    """Makes a folder that is removed at the end, and removes those of runs that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or one that is in use
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW_S:
                    shutil.rmtree(left)
            finally:
                os.close(lock)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:  # mode 0700
        lock = os.open(name, os.O_RDONLY)
        try:
            # The system drops it with this process, however that ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)
