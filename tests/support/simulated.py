"""What the simulation of elastic jobs has in place of processes, a network and a group."""

import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import torch.distributed as dist

from ddp_from_scratch.common.errors import CommunicationError, UsageError

if TYPE_CHECKING:
    from tests.support.simulation import Simulation

TIMEOUT_S = 10.0  # of the machines, for each other


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
            self.alive, self.code, self.ended_at = False, code, self.sim.now
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


class Connection:
    """One end of a machine's connection to machine 0: both prove that they know the secret."""

    def __init__(self, sim: "Simulation", other: "Connection | None" = None) -> None:
        self._sim, self._closed, self._received = sim, False, b""
        self._owner = sim.agents[0] if other else sim.process
        self.other = other or Connection(sim, self)
        self.settimeout = partial(setattr, self, "_timeout")

    def _is_gone(self) -> bool:
        return self._closed or not self._owner.alive

    def sendall(self, data: bytes) -> None:
        if self.other._is_gone():
            raise ConnectionResetError
        self.other._received += data

    def recv(self, count: int) -> bytes:
        ends = self._sim.now + self._timeout
        self._sim.sleep(self._sim.random.uniform(0.0, 0.3))
        while not self._received and not self.other._is_gone():
            if self._sim.now > ends:
                raise TimeoutError
            self._sim.sleep(0.01)
        data, self._received = self._received[:count], self._received[count:]
        return data

    def getpeername(self) -> tuple[str, int]:
        return "machine 0", 1

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True


def locked() -> threading.Lock:
    """A lock that one thread acquires once another has released it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Task:
    def __init__(self, process: Process, function: Callable[[], Any], is_main: bool = True) -> None:
        self.process, self.wakes, self.done = process, process.sim.now, False
        self.go = locked()
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
        except (NoStore, UsageError) as error:  # the job is over, or refuses this machine
            if sim.agents[0].alive and "machine 0" in str(error):
                sim.note_that_one_gives_up(str(error))
            self.process.end(1)
        except Exception as error:  # noqa: BLE001
            sim.wrong.append(f"{type(error).__name__}: {error}")
            self.process.end(1)
        finally:
            self.done = True
            sim.resume_next()


class Store:
    """A machine's way to the store, which machine 0's agent serves; waits while it is cut off."""

    def __init__(self, process: Process, timeout: float = TIMEOUT_S) -> None:
        self._process, self._timeout = process, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sim = self._process.sim
            sim.messages += 1
            sim.maybe_pause()
            ends = sim.now + self._timeout
            while self._process.machine in sim.cut or sim.agents[0].stopped:
                if name == "get" and sim.now > ends:  # the only call that torch ends
                    raise dist.DistStoreError("wait timeout")
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
