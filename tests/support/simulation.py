"""A whole elastic job in one process: agents, ranks and their store, on a virtual clock.

    python -m tests.support.simulation --seeds 10000   random failures
    python -m tests.support.simulation --growth        what losing a rank costs, by number of ranks

The agents, `Membership` and `ElasticRun` are the library's own code. Processes, machines, the
network, the store and gloo's groups are simulated. A task is a thread, and only one runs at a time:
the seed decides which one, when messages arrive, and what fails. So a seed repeats exactly.
"""

import argparse
import pickle
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from ddp_from_scratch.common.errors import CommunicationError, UsageError
from ddp_from_scratch.launch import agent, elastic_agent, fork_server, nodes
from ddp_from_scratch.launch.elastic_agent import ElasticAgent, JobStore, NodeAgent
from ddp_from_scratch.launch.nodes import Job, Link, Nodes
from ddp_from_scratch.world import elastic
from ddp_from_scratch.world.elastic import ElasticRun

STEPS, STEP_S, MAX_RESTARTS = 12, 0.5, 4
LIMIT_S = 600.0  # of virtual time: a job that lasts longer waits for ever


class Killed(BaseException):
    pass


class NoStore(RuntimeError):
    """What torch's store raises once machine 0's agent is gone, and with it the job."""


class Process:
    """An agent or a rank, as a `Child` of its agent; the system ends it with its parent."""

    def __init__(self, sim: "Simulation", machine: int, environ: Any = None) -> None:
        self.sim, self.machine, self.environ, self.pid = sim, machine, environ, None
        self.alive, self.stopped, self.code = True, False, None
        self.children: list[Process] = []
        self.joined: list[Group] = []
        self.group: Any = None
        self.rank = self.rounds = 0  # in this group: its number, and its collectives so far
        self.is_broken: Callable[[], bool] = lambda: False

    def end(self, code: int) -> None:
        if self.alive:
            self.alive, self.code = False, code
            for group in self.joined:
                group.dead.append(self)
            for child in self.children:
                child.end(-signal.SIGKILL)

    def poll(self) -> int | None:
        self.sim.check_alive()
        return self.code

    def wait(self) -> int:
        while self.poll() is None:
            self.sim.sleep(0.01)
        return self.code

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self.sim.check_alive()
        if number == signal.SIGKILL or not self.stopped:
            self.end(-number)


class Channel:
    """One end of the pipe between an agent and its fork server."""

    def __init__(self, sim: "Simulation", other: "Channel | None" = None) -> None:
        self.owner = sim.process
        self.received: list[Any] = []
        self.other = other or Channel(sim, self)

    def send(self, message: Any) -> None:
        if not (self.owner.alive and self.other.owner.alive):
            raise OSError
        self.other.received.append(message)

    def poll(self) -> bool:
        return bool(self.received) or not self.other.owner.alive

    def recv(self) -> Any:
        if not self.received:
            raise EOFError
        return self.received.pop(0)

    def fileno(self) -> int:
        return 0

    def __enter__(self) -> "Channel":
        return self

    def close(self, *_: object) -> None:
        pass

    __exit__ = close


class Task:
    def __init__(self, process: Process, function: Callable[[], Any], is_main: bool = True) -> None:
        self.process, self.wakes, self.done = process, process.sim.now, False
        self.go = threading.Semaphore(0)
        self._function, self._is_main = function, is_main

    def start(self) -> None:
        self.process.sim.tasks.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def join(self, seconds: float) -> None:
        sim = self.process.sim
        ends = sim.now + seconds
        while not self.done and sim.now < ends:
            sim.sleep(0.01)

    def _run(self) -> None:
        sim = self.process.sim
        self.go.acquire()
        try:
            sim.check_alive()
            code = self._function()
            if self._is_main:
                self.process.end(code)
        except Killed:
            pass
        except (NoStore, UsageError):  # the job is over, or refuses this machine
            self.process.end(1)
        except Exception as error:  # noqa: BLE001
            sim.wrong.append(f"{type(error).__name__}: {error}")
            self.process.end(1)
        finally:
            self.done = True
            sim.baton.release()


class Store:
    """A machine's way to the store, which machine 0's agent serves; waits while it is cut off."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sim = self._process.sim
            sim.messages += 1
            sim.maybe_pause()
            while self._process.machine in sim.cut or sim.agents[0].stopped:
                sim.sleep(0.05)
            if not sim.agents[0].alive:
                raise NoStore
            assert name != "get" or sim.data.check([*arguments]), arguments  # else it would wait
            return getattr(sim.data, name)(*arguments)

        return call


class Group:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.members: dict[int, Process] = {}
        self.dead: list[Process] = []
        self.left: set[int] = set()
        self.rounds: dict[int, dict[int, Any]] = {}
        self.done: set[int] = set()

    set_timeout = Mock()


class Work:
    """A collective: each rank gives a value, and gets those of all."""

    def __init__(self, sim: "Simulation", value: Any, result: Callable[[list[Any]], Any]) -> None:
        self._sim, self._process, self._result = sim, sim.process, result
        self._group, self._number = self._process.group, self._process.rounds
        self._process.rounds += 1
        self._given = self._group.rounds.setdefault(self._number, {})
        self._given[self._process.rank] = value
        self._complete()

    def _complete(self) -> None:
        sim, group = self._sim, self._group
        is_given = len(self._given) == group.size and not group.left
        if self._number not in group.done and is_given and sim.reach_all(self._process, group):
            group.done.add(self._number)
            if group.number < sim.newest:
                sim.wrong.append(f"generation {group.number} continues beside {sim.newest}")
            sim.newest = group.number

    def wait(self) -> Any:
        sim, group, looked = self._sim, self._group, self._sim.now
        while True:
            sim.sleep(sim.random.uniform(0.001, 0.005))
            self._complete()
            gone = group.left or any(sim.reach(self._process, other) for other in group.dead)
            # On some ranks a collective fails that has ended well on others.
            if self._number in group.done and not (gone and sim.random.random() < 0.3):
                return self._result([self._given[rank] for rank in range(group.size)])
            if gone:
                raise CommunicationError("connection closed by peer")
            if sim.now - looked > 0.5:
                looked = sim.now
                if self._process.is_broken():
                    raise CommunicationError("a rank of the group was lost")


class Optimizer:
    """Its state, beside the step, is a number that depends on every step before."""

    def __init__(self) -> None:
        self.value = 0
        self._hooks: list[Callable[..., None]] = []
        self.register_step_post_hook = self._hooks.append

    def step(self, by: int) -> None:
        self.value = (3 * self.value + by) % 1_000_003
        for hook in self._hooks:
            hook()

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


# What the simulation stands for: a module, or the function of this name that it has.
REPLACED = {
    agent: "time can_fork say _is_stopped",
    elastic_agent: "time say",
    nodes: "time say threading",
    fork_server: "time os subprocess Pipe",
    elastic: "time os dist job_store replace_group close_default_group set_failure_detector "
    "abort_on_lost_rank broadcast_state",
}


class Simulation:
    """One job; `code` is the exit code of machine 0's agent."""

    def __init__(
        self, seed: int, counts: list[int] | None = None, faults: int = 4, kill_at: float = 0.0
    ) -> None:
        self.random, self.now, self.messages = random.Random(seed), 0.0, 0
        self.tasks: list[Task] = []
        self.baton = threading.Semaphore(0)
        self.running: Any = None
        self.data = dist.HashStore()
        self.groups: dict[int, Group] = {}
        self.ranks: list[Process] = []
        self.cut: set[int] = set()  # machines
        self.said: list[str] = []  # by the agents
        self.say = self.said.append
        self.wrong: list[str] = []  # what should not have happened
        self.values: dict[int, int] = {}  # by step, the optimizer's state before it
        self.newest = 0  # the last generation that has finished a collective
        self.steps: list[tuple[float, int]] = []  # time and messages at the end of each step
        self.counts = counts or self.random.choice([[3], [4], [2, 2], [1, 2], [2, 1, 1]])
        self.agents: dict[int, Process] = {}
        for machine in range(len(self.counts)):
            self.start_machine(machine)
        Task(Process(self, -1), lambda: self._misfortunes(faults, kill_at)).start()

    def run(self) -> "Simulation":
        with ExitStack() as stack:
            for place, names in REPLACED.items():
                for name in names.split():
                    stack.enter_context(patch.object(place, name, getattr(self, name, self)))
            for name in ("signal", "getsignal"):
                stack.enter_context(patch.object(signal, name))
            number_of = lambda _, generation: generation.number  # noqa: E731
            stack.enter_context(patch.object(elastic.Membership, "_group_store", number_of))
            self._run_tasks()
        self.code = self.agents[0].code
        if self.code not in (0, 137, -signal.SIGKILL):  # 137: no rank with trained state is left
            self.wrong.append(f"the job ended with {self.code}")
        return self

    @property
    def process(self) -> Process:
        return self.running.process

    def check_alive(self) -> None:
        if not self.process.alive:
            raise Killed

    def maybe_pause(self) -> None:
        if self.random.random() < 0.05:
            self.sleep(self.random.choice([0.0, 0.002, 0.03]))
        self.check_alive()

    def _run_tasks(self) -> None:
        while ahead := [t for t in self.tasks if not t.done]:
            able = [t for t in ahead if not t.process.stopped or not t.process.alive]
            if not able or self.now > LIMIT_S:
                self.wrong.append(f"{len(ahead)} tasks wait for ever")
                for task in ahead:
                    task.process.end(1)
                able = ahead
            # What is gone ends at once.
            task = min(able, key=lambda t: t.wakes if t.process.alive else 0.0)
            self.now = max(self.now, task.wakes) if task.process.alive else self.now
            self.running = task
            task.go.release()
            self.baton.acquire()

    def start_machine(self, number: int) -> None:
        process = self.agents[number] = Process(self, number)
        Task(process, lambda: self._agent(process)).start()

    def _agent(self, process: Process) -> int:
        number, store = process.machine, Store(process)
        arguments = ["true"], lambda member: {"DDP_MEMBER": str(member)}
        if number:
            link: Any = Link(store, number, Job(self.counts, True, {}), 60.0)
            return NodeAgent(*arguments, (), peers=link).run()
        others = Nodes(store, Job(self.counts, True, {}), 60.0) if len(self.counts) > 1 else None
        job: Any = {"counts": self.counts, "max_restarts": MAX_RESTARTS, "store": JobStore(store)}
        return ElasticAgent(*arguments, range(sum(self.counts)), peers=others, **job).run()

    def _rank(self, process: Process) -> int:
        self.sleep(self.random.uniform(0.0, 1.0))  # it imports
        optimizer = Optimizer()
        most_ranks = max(8, sum(self.counts))
        reducer = Mock(module=torch.nn.Module())
        membership: Any = elastic.Membership(Mock(rank=0), most_ranks, 60.0)
        run: Any = ElasticRun(membership, reducer, optimizer)
        for attempt in run.attempts(STEPS):
            with attempt:
                self.sleep(STEP_S * self.random.uniform(0.5, 1.5))
                mine = run.step, optimizer.value
                everyone = Work(self, mine, list).wait()
                self._note_step(process, everyone)
                optimizer.step(run.step + 1)
        if (run.step, optimizer.value) != (STEPS, result()):
            self.wrong.append(f"a rank ended with {optimizer.value} after {run.step} steps")
        return 0

    def _note_step(self, process: Process, everyone: list[tuple[int, int]]) -> None:
        if len(set(everyone)) > 1:
            self.wrong.append(f"generation {process.group.number} has different states: {everyone}")
        step, value = everyone[0]
        if process.rank == 0:
            self.steps.append((self.now, self.messages))
        if self.values.setdefault(step, value) != value:
            self.wrong.append(f"step {step} has begun with {value} and {self.values[step]}")

    def reach(self, one: Process, other: Process) -> bool:
        return one.machine == other.machine or not self.cut & {one.machine, other.machine}

    def reach_all(self, one: Process, group: Group) -> bool:
        members = group.members.values()
        return len(members) == group.size and all(self.reach(one, other) for other in members)

    def _misfortunes(self, faults: int, kill_at: float) -> None:
        if kill_at:
            self.sleep(kill_at)
            [rank for rank in self.ranks if not rank.machine][1].kill()
        for _ in range(self.random.randrange(faults + 1)):
            self.sleep(self.random.uniform(*self.random.choice([(0.0, 1.0), (0.2, 5.0)])))
            ranks = [rank for rank in self.ranks if rank.alive]
            others = [number for number in self.agents if number]
            kinds = ["kill", "kill", "stop"] * 3
            kinds += ["cut", "off", "again", "freeze"] * 3 * bool(others)
            kind = self.random.choice([*kinds, "end"])
            if kind in ("kill", "stop") and ranks:
                rank = self.random.choice(ranks)
                rank.stopped = kind == "stop"
                if kind == "kill":
                    rank.end(-signal.SIGKILL)
            elif kind == "cut":
                machine = self.random.choice(others)
                self.cut.add(machine)
                self.sleep(self.random.uniform(0.5, 12.0))
                self.cut.discard(machine)
            elif kind == "freeze":
                self._freeze(self.random.choice([*self.agents]))
            elif kind in ("off", "again"):
                machine = self.random.choice(others)
                self.agents[machine].end(-signal.SIGKILL)
                if kind == "again":
                    self.sleep(self.random.uniform(0.0, 8.0))
                    self.start_machine(machine)
            elif kind == "end":
                self.agents[0].end(-signal.SIGKILL)

    def _freeze(self, machine: int) -> None:
        """Stops all processes of a machine for a while, wherever they are."""
        here = {task.process for task in self.tasks if task.process.machine == machine}
        frozen = [process for process in here if process.alive and not process.stopped]
        for process in frozen:
            process.stopped = True
        self.sleep(self.random.choice([self.random.uniform(0.5, 12.0), 70.0]))
        for process in frozen:
            process.stopped = False

    def _serve(self, requests: Channel) -> int:
        """A fork server, as `fork_server.serve`."""
        self.sleep(self.random.uniform(0.0, 2.0))  # it imports
        running: dict[int, Process] = {}
        while True:
            self.sleep(0.01)
            for index, rank in [*running.items()]:
                if not rank.alive:
                    del running[index]
                    requests.send((index, rank.pid, rank.code))
            if not requests.received:
                continue
            index, command, environ = requests.recv()
            if command is not None:
                rank = running[index] = self._fork(environ)
                requests.send((index, rank.pid, None))
            elif index in running:
                running[index].kill()

    def _fork(self, environ: Any) -> Process:
        rank = Process(self, self.process.machine, environ)
        rank.pid = len(self.ranks)
        self.process.children.append(rank)
        self.ranks.append(rank)
        Task(rank, lambda: self._rank(rank)).start()
        return rank

    # What `REPLACED` names; of a module, what the library uses of it ------------------------------

    DEVNULL = None
    ReduceOp = dist.ReduceOp

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.check_alive()
        task = self.running
        task.wakes = self.now + seconds * self.random.uniform(1.0, 1.2)
        self.baton.release()
        task.go.acquire()
        self.check_alive()

    def Thread(self, target: Callable[[], None], daemon: bool) -> Task:
        return Task(self.process, target, is_main=False)

    def can_fork(self, command: Any) -> bool:
        return True

    def Pipe(self) -> tuple[Channel, Channel]:
        self._pipe = Channel(self)
        return self._pipe, self._pipe.other

    def Popen(self, command: Any, **_: Any) -> Process:
        theirs = self._pipe.other
        server = theirs.owner = Process(self, self.process.machine)
        self.process.children.append(server)
        Task(server, lambda: self._serve(theirs)).start()
        return server

    def getpid(self) -> int:
        return 0

    def kill(self, pid: int, number: int) -> None:
        self.ranks[pid].send_signal(number)

    def _is_stopped(self, child: Any) -> bool:
        return child.pid is not None and self.ranks[child.pid].stopped

    @property
    def environ(self) -> Any:
        return self.process.environ

    def job_store(self) -> JobStore:
        return JobStore(Store(self.process))

    def replace_group(self, world: Any, number: int, rank: int, machines: Any, timeout: Any) -> Any:
        process, ends = self.process, self.now + timeout.total_seconds()
        group = self.groups.setdefault(number, Group(number, len(machines)))
        group.members[rank] = process
        process.joined.append(group)
        while not (self.reach_all(process, group) and all(p.alive for p in group.members.values())):
            if self.now > ends or group.left:
                group.left.add(rank)
                raise RuntimeError("a rank has not connected")
            self.sleep(0.01)
        process.group, process.rank, process.rounds = group, rank, 0
        return Mock(rank=rank)

    def close_default_group(self) -> None:
        if self.process.group is not None:
            self.process.group.left.add(self.process.rank)
            self.process.group = None

    def abort_on_lost_rank(self, group: Group, is_broken: Callable[[], bool]) -> None:
        self.process.is_broken = is_broken

    set_failure_detector = Mock()

    @property
    def group(self) -> Any:
        return SimpleNamespace(WORLD=self.process.group)

    def is_initialized(self) -> bool:
        return self.process.group is not None

    def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Work:
        return Work(self, tensor.clone(), lambda given: tensor.copy_(torch.stack(given).amax(0)))

    def barrier(self, async_op: bool) -> Work:
        return Work(self, None, list)

    def broadcast_state(self, state: Any, source: int) -> Any:
        return Work(self, pickle.dumps(state), lambda given: pickle.loads(given[source])).wait()


def result() -> int:
    optimizer = Optimizer()
    for step in range(STEPS):
        optimizer.step(step + 1)
    return optimizer.value


def growth(machines: int) -> str:
    """A line of the table: one of 8 ranks on each machine is killed."""
    sim = Simulation(0, [8] * machines, faults=0, kill_at=4.0).run()
    assert not sim.wrong, sim.wrong
    gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(sim.steps)]
    seconds, messages = max(gaps)
    ordinary = sorted(gap[1] for gap in gaps)[len(gaps) // 2]
    return f"{8 * machines:>5} {machines:>9} {seconds:>9.2f} {messages:>9,} {ordinary:>9,}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="default: 1000")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--growth", action="store_true", help="print the table")
    options = parser.parse_args()
    if options.growth:
        print("ranks  machines   seconds  messages  in a step")
        for machines in (1, 4, 16, 32, 64):
            print(growth(machines), flush=True)
        return 0
    codes: Counter[int | None] = Counter()
    failed = 0
    for seed in range(options.first, options.first + options.seeds):
        sim = Simulation(seed).run()
        codes[sim.code] += 1
        if sim.wrong:
            failed += 1
            print(f"seed {seed}, ranks {sim.counts}:", *sim.wrong, *sim.said, sep="\n  ")
    print("exit codes:", ", ".join(f"{code}: {count}" for code, count in codes.items()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
