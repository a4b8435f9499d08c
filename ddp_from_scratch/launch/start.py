"""Starts the ranks of one machine, by itself or through mpirun; `agent.py` watches them."""

import os
import pickle
import re
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch import ancestors, cores, environment
from ddp_from_scratch.launch.agent import Agent
from ddp_from_scratch.launch.debugging import same_terminal_afterwards, variables
from ddp_from_scratch.launch.elastic_agent import ElasticAgent, NodeAgent
from ddp_from_scratch.launch.fork_server import OPTIMIZERS
from ddp_from_scratch.launch.job_store import FileStore, JobStore
from ddp_from_scratch.launch.nodes import Job, Link, MachineRegistry
from ddp_from_scratch.launch.output import Output
from ddp_from_scratch.launch.policy import Elastic, FailTogether, Policy
from ddp_from_scratch.launch.rank_process import die_with, run_to_exit, say

if TYPE_CHECKING:
    import torch.distributed as dist

MAX_RESTARTS = 50_000
# What most programs import, besides torch.
_PRELOAD = ("ddp_from_scratch.world.world", "ddp_from_scratch.reducer", OPTIMIZERS)


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
    replace_wrong: bool = True,
    must_match: Mapping[str, str] = MappingProxyType({}),
    stdin: int | None = None,
    output_prefix: bool = False,
    output_ranks: Sequence[int] | None = None,
    output_dir: Path | str | None = None,
    bind: str = "auto",
) -> int:
    """Runs a command or a function once for each rank of this machine; waits for all of them.

    On one machine the ranks meet through a private file, and no port is opened. On several
    machines, machine 0 listens only on `master_port` of `master_addr`, and accepts machines that
    know the job's secret. Set DDP_SECRET on all of them, or copy the one that machine 0 prints.

    On Linux, ranks of `[sys.executable, "program.py", ...]`, or of the same with -m or -c, are
    forked from a process that has imported torch; any other command is executed.

    When a rank fails, all others are ended, on every machine. With `max_restarts` the others
    continue (`ddp.elastic`), and a new process replaces the failed one. `agent.py` has a table of
    signals.

    Args:
        command: a program and its arguments; each rank gets torchrun's variables. Or a function
            without arguments, which may be from a notebook. It runs in new processes on copies of
            the objects that it uses, and its result is dropped. A UsageError in it prints as one
            line.
        counts: number of processes on each machine.
        node_rank: this machine's position in `counts`.
        master_addr: an address of machine 0 that the others can reach.
        master_port: the port that machine 0 listens on.
        timeout: seconds to wait for the other machines, and later for their heartbeats. With
            `max_restarts` also for a process that does not come to the others after a loss: it
            counts as failed, and is killed and replaced. So a step must be shorter.
        preload: modules to import once, before ranks are forked.
        max_restarts: how many failed processes may be replaced, for programs that use
            `ddp.elastic`. Machine 0's value counts. None ends all ranks when one fails.
        replace_wrong: False: a process that has computed wrongly (`Reducer(recheck_every=N)`) is
            not replaced, because another one on its machine may do the same. A machine that is lost
            and comes back gets all its processes again.
        must_match: options, by name, that must be equal on a machine that joins or rejoins.
        stdin: the rank that reads this process's standard input, for `breakpoint()`. On the other
            ranks `breakpoint()` does nothing, and groups wait without a timeout.
        output_prefix: begin each line of a rank's output with "[rank 2] ". With this option and the
            next two, ranks write into pipes, and this process forwards whole lines.
        output_ranks: the ranks whose output is shown; None means all.
        output_dir: a folder for a file with all output of each rank, `rank-2.log` (in an elastic
            job `process-2.log`). Output is appended to an existing file.
        bind: "auto" gives each rank its own cores, within a NUMA node or socket if possible, and as
            many threads, through OMP_NUM_THREADS unless that is set. With more ranks than cores, or
            a cgroup's quota, no rank is bound. "cores" raises there. "socket" binds each rank to
            the sockets of its cores. "none" changes nothing. With `max_restarts` on several
            machines each rank has one thread, whatever its cores, because machines may differ.
            macOS cannot bind: "auto" sets only threads there.

    Returns:
        0 if every rank exited with 0; 128 + N after signal N; else the exit code of the first rank
        that failed (128 + N if signal N killed it).

    Raises:
        UsageError: the machines do not meet; a value is out of range; the function cannot be
            pickled; `bind` is impossible; or this is not the main thread.
    """
    _check_job(counts, max_restarts, replace_wrong, stdin)
    policy = _policy_of(max_restarts, replace_wrong)
    seats = _divide(counts, node_rank, bind, policy.elastic)
    peers: MachineRegistry | Link | None = None
    output: Output | None = None
    with ExitStack() as stack:
        if output_prefix or output_ranks is not None or output_dir is not None:
            name = "process {}" if policy.elastic else "rank {}"
            folder_of_logs = None if output_dir is None else Path(output_dir)
            output = Output(name, output_prefix, output_ranks, folder_of_logs)
            stack.callback(output.close)
        if stdin is not None:
            stack.enter_context(same_terminal_afterwards())
        # Private (mode 0700): the ranks' files.
        temporary = environment.temporary_folder()
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp-run-", dir=temporary))
        )
        if callable(command):
            command = _command_of(command, folder)
        common = {environment.PARENT: str(ancestors.own()), environment.STARTED_HERE: "1"}
        store: FileStore | dist.Store = FileStore(folder)
        if len(counts) > 1:
            # Imports torch, which the agent of a single machine does without.
            from ddp_from_scratch.launch.rendezvous import open_store

            met = stack.enter_context(open_store(node_rank, master_addr, master_port, timeout))
            store, common = met[0], common | met[1]
            job = Job([*counts], policy.elastic, {**must_match})
            if node_rank == 0:
                peers = MachineRegistry(store, job, policy, timeout)
            else:
                peers = Link(store, node_rank, job, timeout)
        else:
            common[environment.RENDEZVOUS_FILE] = str(folder / "rendezvous")
        common_to_all: dict[str, Any] = {"output": output} | seats
        if isinstance(policy, FailTogether):
            here = environment.rank_environments(counts, node_rank)
            ranks = {int(variables["RANK"]): common | variables for variables in here}
            if stdin is not None:
                ranks = {rank: own | variables(rank, stdin) for rank, own in ranks.items()}
            reads = stdin is not None and stdin in ranks
            return Agent(
                *(command, ranks.__getitem__, ranks, preload, peers), debugs=reads, **common_to_all
            ).run()
        (alone,) = environment.rank_environments([1], 0)  # its world until its first generation

        def environment_of(member: int) -> dict[str, str]:
            file = str(folder / f"alone-{member}")
            own = {environment.MEMBER: str(member), environment.RENDEZVOUS_FILE: file}
            return common | alone | own

        if isinstance(peers, Link):
            return NodeAgent(command, environment_of, (), preload, peers, **common_to_all).run()
        return ElasticAgent(
            command,
            environment_of,
            range(sum(counts)),
            preload,
            peers=peers,
            counts=counts,
            policy=policy,
            store=JobStore(store),
            timeout=timeout,
            **common_to_all,
        ).run()


def _policy_of(max_restarts: int | None, replace_wrong: bool) -> Policy:
    return FailTogether() if max_restarts is None else Elastic(max_restarts, replace_wrong)


def _check_job(
    counts: Sequence[int], max_restarts: int | None, replace_wrong: bool, stdin: int | None
) -> None:
    """Raises a UsageError if this thread, or with these arguments any, cannot start ranks."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"start_ranks must be called in the main thread, the only one that may handle the "
            f"signals that stop ranks, got {threading.current_thread().name}"
        )
    environment.check_alone()
    if min(counts, default=0) < 1:
        raise UsageError(f"counts must be 1 or more for each machine, got {list(counts)}")
    if max_restarts is not None and not 0 <= max_restarts <= MAX_RESTARTS:
        raise UsageError(f"max_restarts must be 0 to {MAX_RESTARTS:,}, got {max_restarts}")
    if not replace_wrong and max_restarts is None:
        raise UsageError("replace_wrong=False is for jobs with max_restarts, which is None")
    if stdin is not None and (max_restarts is not None or not 0 <= stdin < sum(counts)):
        raise UsageError(
            f"stdin must be a rank, 0 to {sum(counts) - 1}, of a job without max_restarts, "
            f"got {stdin}"
        )


def _divide(counts: Sequence[int], node_rank: int, bind: str, elastic: bool) -> dict[str, Any]:
    """Divides this machine's cores, and says how; returns what an `Agent` takes."""
    plan = cores.plan_here(counts[node_rank], bind)
    if elastic and len(counts) > 1:
        # Bits depend on it, and another machine may have more cores for each rank.
        plan = replace(plan, threads=1, text="")
    if plan.text:
        say(plan.text)
    return {"cpus": plan.cpus, "variables": cores.variables(plan, bind)}


def start_mpirun(nproc: int, command: Sequence[str], *, bind: str = "auto") -> int:
    """Runs `mpirun -n nproc command` on this machine, and waits for it.

    The parent forwards Ctrl-C and SIGTERM, which Open MPI sends to the ranks as SIGUSR1.

    Args:
        nproc: the number of ranks.
        command: the program and its arguments, as for `start_ranks`.
        bind: as for `start_ranks`; ranks are bound in `ddp.process_group`. "none" leaves it to
            mpirun.

    Returns:
        mpirun's exit code.

    Raises:
        UsageError: there is no mpirun, `bind` cannot be, or this process has a part of a rank's
            variables: `WORLD_SIZE` without `RANK`, say.
    """
    environment.check_alone()
    full, defaults = environment.mpirun_command(nproc, command)
    defaults[environment.STARTED_HERE] = "1"
    plan = cores.plan_here(nproc, bind)
    own = cores.variables(plan, bind)
    if bind != "none":
        defaults |= environment.UNBOUND
        own[environment.CPUS_OF_RANKS] = ";".join(plan.cpus)
    say(f"starting: {shlex.join(full)}")
    if plan.text:
        say(plan.text)
    parent = os.getpid()
    read, write = os.pipe()

    def set_up() -> None:
        die_with(parent, signal.SIGTERM)  # which mpirun itself does not do
        os.dup2(write, 2)

    agent = Agent(
        full,
        lambda _: defaults | os.environ | own,
        range(1),
        # After other signals Open MPI kills its ranks 0.2 s later, too early for a checkpoint.
        ladder=(signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL),
        set_up=set_up,
        name=Path(full[0]).name,
    )
    thread = threading.Thread(target=_pass_on, args=[read, agent], daemon=True)
    thread.start()
    try:
        return agent.run()
    finally:
        os.close(write)
        thread.join(1.0)  # a process that outlives mpirun may hold the pipe


_RULE = rb"(?m:^)-{74}\n"  # begins and ends each message of mpirun's own


def _pass_on(read: int, agent: Agent) -> None:
    """Passes mpirun's standard error on; once the ranks are to stop, without its own messages.

    It reports ranks that have stopped as asked, with exit code 138 or by the signal, as failures.
    """
    held = b""
    while text := os.read(read, 2**16):
        held += text
        if agent.is_stopping:
            held = re.sub(_RULE + b".*?" + _RULE, b"", held, flags=re.DOTALL)
        if not (agent.is_stopping and re.search(_RULE, held)):  # a message that has not ended
            _write(held)
            held = b""
    os.close(read)
    _write(held)


def _write(text: bytes) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, text)


# A function as a command --------------------------------------------------------------------------

_CALL = (  # restores the caller's path, to import the function's modules, and its arguments
    "import pickle, sys; path, sys.argv, function = pickle.load(open(sys.argv[1], 'rb')); "
    f"sys.path[:] = path; from {__name__} import call; call(function)"
)


def _command_of(function: Callable[[], Any], folder: Path) -> list[str]:
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    try:
        from cloudpickle import dumps
    except ImportError:
        if inner.__module__ == "__main__":  # cloudpickle writes it with its code, others by name
            raise UsageError(
                f"start_ranks({name}): a function of a notebook or of the program itself needs "
                f"cloudpickle: pip install cloudpickle, or put the function into a module"
            ) from None
        dumps = pickle.dumps
    try:
        written = dumps(function)
    except Exception as error:  # pickling may raise anything
        raise UsageError(
            f"start_ranks({name}): the function or what it uses cannot be sent to a process: "
            f"{error}; create it inside the function"
        ) from error
    file = folder / "function"
    file.write_bytes(pickle.dumps((sys.path, sys.argv, written)))
    return [sys.executable, "-c", _CALL, str(file)]


def call(written: bytes) -> None:
    """Calls the function in a rank. A UsageError ends the rank as in `run_to_exit`."""
    try:
        pickle.loads(written)()
    except UsageError as error:
        run_to_exit(partial(_raise, error))


def _raise(error: Exception) -> NoReturn:
    raise error
