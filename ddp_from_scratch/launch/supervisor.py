"""Starts the ranks of one machine, watches them, and ends them together.

Used where no launcher is: `python run.py`, and one such command on each of several machines.

Event                                          Sent to the ranks
---------------------------------------------  -----------------------------------------------------
Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP             SIGTERM: they finish a step, save, and end. Under
                                               mpirun SIGUSR1, all that it hands on in time
a second Ctrl-C or SIGTERM                     SIGKILL (mpirun: SIGTERM, then SIGKILL at a third)
SIGQUIT or SIGUSR2                             SIGTERM, and SIGKILL 5 s later
SIGKILL                                        SIGKILL, from the system (`rank_process.die_with`)
nothing, but one rank fails                    SIGTERM, and SIGKILL 5 s later

Ranks live in sessions of their own, so that the terminal's Ctrl-C reaches them once, through here.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.board import Board
from ddp_from_scratch.launch.environment import (
    BOARD,
    MEMBER,
    PARENT,
    RENDEZVOUS_FILE,
    STARTED_HERE,
    TERMINAL,
    mpirun_command,
    rank_environments,
    require_loopback,
)
from ddp_from_scratch.launch.fork_server import OPTIMIZERS
from ddp_from_scratch.launch.going_on import GoingOnWatch
from ddp_from_scratch.launch.other_machines import Follower, arrive
from ddp_from_scratch.launch.rank_function import command_of
from ddp_from_scratch.launch.rank_process import PR_SET_PDEATHSIG
from ddp_from_scratch.launch.run_folder import run_folder
from ddp_from_scratch.launch.watch import Child, Watch, say

if TYPE_CHECKING:
    import torch.distributed as dist

    from ddp_from_scratch.launch.multi_node import Machines

# What most programs of ranks import, beside torch.
MAX_RESTARTS = 50_000
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
        max_restarts: processes that may be started in the place of failed ones (`going_on.py`), for
            programs with `ddp.elastic`. Machine 0's counts. None ends all ranks when one fails.
        asked: options by name, that a machine which comes later, or again, must have alike.

    Returns:
        0 when every rank ended with 0, 128 + N after signal N, else the exit code of the first rank
        that did not end well (128 + N when it was killed by signal N).

    Raises:
        UsageError: the port is taken, machine 0 does not answer or refuses this machine, or the
            machines were given different counts or secrets; a function cannot be sent
            (`rank_function.command_of`); a machine has no process; `max_restarts` is out of range;
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
    ranks = rank_environments(counts, node_rank)
    common = {PARENT: str(os.getpid()), STARTED_HERE: "1"}
    machines: Machines | None = None
    with ExitStack() as stack:
        if callable(command):
            command = command_of(command, stack.enter_context(run_folder()))
        if max_restarts is not None:
            at = node_rank, master_addr, master_port, timeout, asked
            return _start_going_on(stack, command, counts, max_restarts, preload, *at)
        if len(counts) > 1:
            # Here and not above: it imports torch, which a parent on one machine does without.
            from ddp_from_scratch.launch import multi_node

            machines = multi_node.Machines(counts, node_rank, master_addr, master_port, timeout)
            stack.callback(machines.close)
            common |= machines.environment
        else:
            common[RENDEZVOUS_FILE] = str(stack.enter_context(run_folder()) / "rendezvous")
        return Watch(command, [common | rank for rank in ranks], preload, machines).run()


def _start_going_on(
    stack: ExitStack,
    command: Sequence[str],
    counts: Sequence[int],
    max_restarts: int,
    preload: Sequence[str],
    node_rank: int,
    master_addr: str,
    master_port: int,
    timeout: float,
    asked: Mapping[str, str],
) -> int:
    """Runs the ranks of this machine as `start_ranks` does, where the others go on without some."""
    folder = stack.enter_context(run_folder())
    # Also for the ranks of machines that come later.
    board = Board(folder, sum(counts) + 2 * MAX_RESTARTS)
    common = {PARENT: str(os.getpid()), STARTED_HERE: "1", BOARD: str(folder)}
    store: dist.Store | None = None
    if len(counts) > 1:
        # Here and not above: it imports torch, which a parent on one machine does without.
        from ddp_from_scratch.launch import multi_node

        meeting = multi_node.Meeting(node_rank, master_addr, master_port, timeout, goes_on=True)
        stack.callback(meeting.close)
        common |= meeting.environment
        store = meeting.store
    # Each process is alone in its world until its first generation.
    (alone,) = rank_environments([1], 0)

    def environment(member: int) -> dict[str, str]:
        own = {MEMBER: str(member), RENDEZVOUS_FILE: str(folder / f"alone-{member}")}
        return common | alone | own

    if store is not None and node_rank > 0:
        ticket = arrive(store, node_rank, counts, asked)
        return Follower(command, environment, board, store, ticket, timeout, preload).run()
    return GoingOnWatch(
        command, environment, counts, max_restarts, board, preload, store, asked, timeout
    ).run()


def start_mpirun(nproc: int, command: Sequence[str]) -> int:
    """Runs `mpirun -n NPROC COMMAND` on this machine and waits for it.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP reach the ranks as SIGUSR1; a second Ctrl-C ends them, and
    so do SIGQUIT and SIGUSR2.

    Returns:
        mpirun's exit code, which is that of the first rank that failed; 128 + N after signal N.

    Raises:
        UsageError: there is no mpirun, or no interface that it could use.
    """
    require_loopback()
    full, defaults = mpirun_command(nproc, command)
    defaults[STARTED_HERE] = "1"
    for stream in (1, 2):
        if os.isatty(stream):
            defaults[f"{TERMINAL}{stream}"] = os.ttyname(stream)
    say(f"starting: {shlex.join(full)}")
    return _MpirunWatch(full, [defaults | os.environ]).run()


class _MpirunWatch(Watch):
    """One child, mpirun, which watches the ranks itself."""

    # mpirun hands SIGUSR1 on and otherwise ignores it. At any other signal Open MPI kills its ranks
    # after 0.2 s, too early for them to have written a checkpoint, and has no setting for that.
    ladder = (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)

    def _start(self, environ: dict[str, str]) -> Child:
        libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
        return subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # mpirun cannot ask for it by itself, as ranks do in `die_with_parent`.
            preexec_fn=lambda: libc and libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
