"""A whole job in one process: agents, ranks and their store, on a virtual clock.

    python -m tests.support.simulation --seeds 10000   random failures of elastic jobs
    python -m tests.support.simulation --together      of jobs whose ranks end together
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
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from ddp_from_scratch.common.errors import CommunicationError
from ddp_from_scratch.launch import agent, elastic_agent, fork_server, nodes, rendezvous
from ddp_from_scratch.launch.agent import Agent
from ddp_from_scratch.launch.elastic_agent import ElasticAgent, NodeAgent
from ddp_from_scratch.launch.environment import MACHINE_0, MEMBER, rank_environments
from ddp_from_scratch.launch.job_store import JobStore
from ddp_from_scratch.launch.nodes import Job, Link, MachineRegistry
from ddp_from_scratch.launch.policy import LOST_S, Elastic, FailTogether
from ddp_from_scratch.world import elastic
from ddp_from_scratch.world.elastic import ElasticRun
from tests.support.simulated import (
    TIMEOUT_S,
    Channel,
    Connection,
    Group,
    Killed,
    Optimizer,
    Process,
    Store,
    Task,
    Work,
    locked,
)

STEPS, STEP_S, MAX_RESTARTS = 12, 1.0, 4
SECRET = b"known to all machines"
LIMIT_S = 600.0  # of virtual time: a job that lasts longer waits for ever


# What the simulation stands for: a module, or the function of this name that it has.
REPLACED = {
    agent: "time can_fork say _is_stopped",
    elastic_agent: "time say",
    nodes: "time say threading",
    fork_server: "time os subprocess Pipe",
    rendezvous: "time socket",
    elastic: "time os dist replace_group close_default_group set_failure_detector "
    "abort_on_lost_rank broadcast_state",
}


class Simulation:
    """One elastic job; `code` is the exit code of machine 0's agent."""

    RANK_FAULTS = ("kill", "kill", "stop")

    def __init__(
        self, seed: int, counts: list[int] | None = None, faults: int = 4, kill_at: float = 0.0
    ) -> None:
        self.random, self.now, self.messages = random.Random(seed), 0.0, 0
        self.tasks: list[Task] = []
        self.running: Any = None
        self.over = locked()
        self.data = dist.HashStore()
        self.groups: dict[int, Group] = {}
        self.ranks: list[Process] = []
        self.cut: set[int] = set()  # machines
        self.said: list[str] = []  # by the agents
        self.failures = 0  # of single ranks, which count towards `MAX_RESTARTS`
        self.away: list[tuple[int, float, float]] = []  # machines: since when, and for how long
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
            self.resume_next()
            self.over.acquire()
        self.code = self.agents[0].code
        self._check()
        return self

    def _check(self) -> None:
        if self.code not in (0, 137, -signal.SIGKILL):  # 137: no rank with trained state is left
            self.wrong.append(f"the job ended with {self.code}")
        counted = sum("(failure " in text for text in self.said)
        if counted > self.failures:
            self.wrong.append(f"{counted} failures, and {self.failures} of single ranks")

    def say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("machine 0 no longer answers"):
            self.note_that_one_gives_up(text)

    def note_that_one_gives_up(self, text: str) -> None:
        """Which is wrong, unless machine 0 was away for longer, or ended while this one was."""
        zero, here = self.agents[0], self.process.machine
        for machine, since, seconds in self.away:
            until = since + 1.2 * seconds + 1  # `sleep` may take longer
            misses_the_end = not zero.alive and since < zero.ended_at < until + LOST_S
            if (machine == here and misses_the_end) or (not machine and until - since > TIMEOUT_S):
                return
        if zero.code != -signal.SIGKILL:
            self.wrong.append(f"machine {here} gives up at {self.now:.1f}: {text}")

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

    def resume_next(self) -> None:
        """Lets the task run whose turn it is, which may be the one that calls this."""
        ahead = self.tasks = [t for t in self.tasks if not t.done]
        if not ahead:
            self.over.release()
            return
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

    def start_machine(self, number: int) -> None:
        process = self.agents[number] = Process(self, number)
        Task(process, lambda: self._agent(process)).start()

    def _agent(self, process: Process) -> int:
        number, store = process.machine, Store(process)
        common = {MACHINE_0: "", "MASTER_PORT": "1"}
        arguments = ["true"], lambda member: common | {MEMBER: str(member)}
        job = Job(self.counts, True, {})
        if number:
            rendezvous._await_answer("machine 0", 1, SECRET, TIMEOUT_S)
            link: Any = Link(store, number, job, TIMEOUT_S)
            return NodeAgent(*arguments, (), peers=link).run()
        others = (
            MachineRegistry(store, job, Elastic(MAX_RESTARTS), TIMEOUT_S)
            if len(self.counts) > 1
            else None
        )
        mine: Any = {
            "counts": self.counts,
            "policy": Elastic(MAX_RESTARTS),
            "store": JobStore(store),
        }
        return ElasticAgent(*arguments, range(sum(self.counts)), peers=others, **mine).run()

    def _rank(self, process: Process) -> int:
        self.sleep(self.random.uniform(0.0, 1.0))  # it imports
        optimizer = Optimizer()
        max_world_size = max(8, sum(self.counts))
        reducer = Mock(module=torch.nn.Module())
        membership: Any = elastic.Membership(Mock(rank=0), max_world_size, 60.0)
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

    def _misfortunes(self, faults: int, kill_at: float) -> None:  # noqa: C901
        if kill_at:
            self.sleep(kill_at)
            [rank for rank in self.ranks if not rank.machine][1].kill()
        for _ in range(self.random.randrange(faults + 1)):
            self.sleep(self.random.uniform(*self.random.choice([(0.0, 1.0), (0.2, 5.0)])))
            ranks = [rank for rank in self.ranks if rank.alive]
            others = [number for number in self.agents if number]
            kinds = [*self.RANK_FAULTS] * 3
            kinds += ["cut", "off", "again", "freeze", "freeze at the end"] * 3 * bool(others)
            kind = self.random.choice([*kinds, "end"])
            if kind in ("kill", "stop") and ranks:
                self.failures += 1
                rank = self.random.choice(ranks)
                rank.stopped = kind == "stop"
                if kind == "kill":
                    rank.end(-signal.SIGKILL)
            elif kind == "cut":
                machine, seconds = self.random.choice(others), self.random.uniform(0.5, 8.0)
                self.away.append((machine, self.now, seconds))
                self.cut.add(machine)
                self.sleep(seconds)
                self.cut.discard(machine)
            elif kind == "freeze":
                self._freeze(self.random.choice([*self.agents]))
            elif kind == "freeze at the end":
                while self.agents[0].alive and not any(rank.code == 0 for rank in self.ranks):
                    self.sleep(0.05)
                self.sleep(self.random.uniform(0.0, 0.2))
                self._freeze(self.random.choice([0, *self.agents]))
            elif kind in ("off", "again"):
                machine = self.random.choice(others)
                self.agents[machine].end(-signal.SIGKILL)
                if kind == "again":
                    self.sleep(self.random.uniform(0.0, 8.0))
                    self.start_machine(machine)
            elif kind == "end":
                self.agents[0].end(-signal.SIGKILL)

    def _freeze(self, machine: int) -> None:
        """Stops all processes of a machine for a while, or its agent alone, wherever they are."""
        here = [*dict.fromkeys(t.process for t in self.tasks if t.process.machine == machine)]
        if self.random.random() < 0.3:
            here = [self.agents[machine]]
        frozen = [process for process in here if process.alive and not process.stopped]
        frozen.sort(key=lambda _: self.random.random())
        seconds = self.random.choice([self.random.uniform(0.5, 9.0), 14.0])
        self.away.append((machine, self.now, seconds))
        for process in frozen:
            process.stopped = True
            self.sleep(self.random.uniform(0.0, 0.01))
        self.sleep(seconds)
        for process in frozen:
            process.stopped = False
            self.sleep(self.random.uniform(0.0, 0.01))

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
        self.resume_next()
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
        return self.process.environ or {}

    def TCPStore(self, *_: Any, is_master: bool, timeout: Any) -> Store:
        return Store(self.process, timeout.total_seconds())

    def create_connection(self, *_: Any) -> Connection:
        if not self.agents[0].alive:
            raise ConnectionRefusedError
        mine = Connection(self)

        def admit() -> None:
            with suppress(OSError, rendezvous.StrangerError):
                rendezvous.check(mine.other, SECRET)
                return
            mine.other.__exit__()

        Task(self.agents[0], admit, is_main=False).start()
        return mine

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


class Together(Simulation):
    """One job whose ranks end together."""

    RANK_FAULTS = ("kill",)  # a stopped rank is waited for

    def _agent(self, process: Process) -> int:
        number, peers = process.machine, None
        if len(self.counts) > 1:
            store: Any = Store(process)
            policy, job = FailTogether(), Job(self.counts, False, {})
            if number:
                rendezvous._await_answer("machine 0", 1, SECRET, TIMEOUT_S)
                peers: Any = Link(store, number, job, TIMEOUT_S)
            else:
                peers = MachineRegistry(store, job, policy, TIMEOUT_S)
        here = {int(own["RANK"]): own for own in rank_environments(self.counts, number)}
        return Agent(["true"], here.__getitem__, here, peers=peers).run()

    def _rank(self, process: Process) -> int:
        self.sleep(self.random.uniform(0.0, 1.0))  # it imports
        process.rank = int(process.environ["RANK"])
        process.group = self.groups.setdefault(0, Group(0, sum(self.counts)))
        process.group.members[process.rank] = process
        process.joined.append(process.group)
        ends = self.now + 2 * TIMEOUT_S
        while len(process.group.members) < process.group.size:
            self.sleep(0.05)
            if self.now > ends:
                return 2
        try:
            for step in range(STEPS):
                self.sleep(STEP_S * self.random.uniform(0.5, 1.5))
                self._note_step(process, Work(self, (step, 0), list).wait())
        except CommunicationError:
            self.sleep(2.0 + 0.2 * process.rank)  # as `run_to_exit`: the one that failed says why
            return 1
        return 0

    def _check(self) -> None:
        """An agent ends with 0 if all ranks have; but one that was away hears of no failure."""
        for number, process in self.agents.items():
            here = [rank.code for rank in self.ranks if rank.machine == number]
            if process.code == 0 and (any(here) or len(here) < self.counts[number]):
                self.wrong.append(f"machine {number} ended well, and its ranks with {here}")
        if self.away or self.agents[0].code == -signal.SIGKILL:
            return
        codes = [agent.code for agent in self.agents.values()]
        if 0 in codes and any(codes):
            self.wrong.append(f"some machines ended well, and others not: {codes}")
        failed = [rank for rank in self.ranks if rank.code]
        if any(codes) and not failed and -signal.SIGKILL not in codes:
            self.wrong.append(f"nothing failed, and the machines ended with {codes}")


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
    parser.add_argument("--together", action="store_true", help="jobs without elasticity")
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
        sim = (Together if options.together else Simulation)(seed).run()
        codes[sim.code] += 1
        if sim.wrong:
            failed += 1
            print(f"seed {seed}, ranks {sim.counts}:", *sim.wrong, *sim.said, sep="\n  ")
    print("exit codes:", ", ".join(f"{code}: {count}" for code, count in codes.items()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
