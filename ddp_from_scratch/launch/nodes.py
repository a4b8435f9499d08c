"""The messages between machine 0's agent (`MachineRegistry`) and those of other machines (`Link`).

    machine 0                      through its store                    machine 1
            <-- "arrival 1": who it is; "answer 1": "" or why not --->  arrive
    Registry --- "job": a failure, the end, and orders -------------->  Link
            <-- "report 1": a failure, the end, and exit codes ------

An agent draws a ticket when it arrives, and the ticket is part of its keys. A second agent on the
same machine therefore gets no orders that were meant for the first.

Each agent watches its own ranks and reports failures. The policy (`policy.py`) says what follows
from a failure, or from a machine without a heartbeat. In an elastic job machine 0 decides, and the
other agents (`NodeAgent`) obey; if machine 0 has no heartbeat, they end their ranks, so two halves
of a job never both continue.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch.fork_server import RemoteRank
from ddp_from_scratch.launch.policy import LOST_S, Policy, Verdict, no_answer
from ddp_from_scratch.launch.rank_process import say

if TYPE_CHECKING:
    import torch.distributed as dist

EXCHANGE_S = 0.02


class Job(NamedTuple):
    """What must be equal on all machines. The fields' names are part of the messages."""

    counts: list[int]  # of the ranks of each
    elastic: bool
    asked: dict[str, str]  # options, by name


@dataclass
class Node:
    """Another machine, as its agent reports it."""

    since: float  # when its last report came
    ticket: int | None = None  # of its agent, once that has arrived
    beat: int = 0  # the last one that was read
    signals: int = 0  # how many were read
    lost: bool = False  # it does not answer
    ended: bool = False  # its ranks have ended
    left: bool = False  # its agent has left the store
    orders: list[tuple[str, int, int]] = field(default_factory=list)
    ranks: dict[int, RemoteRank] = field(default_factory=dict)

    def is_heard(self, now: float) -> bool:
        return self.ticket is not None and now - self.since <= LOST_S


Start = Callable[[int, int], str]  # schedules ranks on a machine; returns why not, or ""


class MachineRegistry:
    """Machine 0's view of the other machines, through a store that all of them reach.

    `timeout` is that of `Policy.patience`, in seconds.
    """

    def __init__(self, store: "dist.Store", job: Job, policy: Policy, timeout: float) -> None:
        self._store, self._policy, self._asked = store, policy, job.asked
        self._counts, self._at_start, self._timeout = [*job.counts], len(job.counts), timeout
        self._nodes = {number: Node(time.monotonic()) for number in range(1, self._at_start)}
        self._waiting: dict[int, float] = {}  # by ticket without an answer: when it arrived
        self._drawn = 0  # the last ticket
        self.signals: list[int] = []  # received by other agents; `ElasticAgent` takes them
        self.lost: set[int] = set()  # processes that were lost with their machine
        self._failure: str | None = None
        self._end: int | None = None
        self._exchanged = time.monotonic()

    # For every agent ------------------------------------------------------------------------------

    def failure(self) -> str | None:
        self.exchange()
        self.admit()
        return self._failure

    def tell_failure(self, text: str) -> None:
        self._failure = f"machine 0: {text}"
        self._write()

    def may_leave(self) -> bool:
        return self.failure() is None and all(node.ended for node in self._nodes.values())

    def close(self, code: int) -> None:
        """Announces the end of the job and waits until the other agents have left the store."""
        self._end = code
        # Counted, not timed: if this machine stands still meanwhile, the others have not heard it.
        for _ in range(round(self._policy.last_word_s / EXCHANGE_S)):
            if all(node.left or node.ticket is None for node in self._nodes.values()):
                return
            self.exchange()
            time.sleep(EXCHANGE_S)

    # For `ElasticAgent` ---------------------------------------------------------------------------

    def start(self, number: int, member: int) -> RemoteRank:
        node = self._nodes[number]

        def send(rank: RemoteRank, number: int) -> None:
            if node.ticket is None:
                rank.returncode = -number  # no agent has started this rank yet
            node.orders.append(("signal", member, number))

        node.ranks[member] = RemoteRank(self.exchange, send)
        node.orders.append(("start", member, 0))
        return node.ranks[member]

    def exchange(self) -> None:
        """Reads all reports and writes the job's state, at most 50 times a second."""
        now = time.monotonic()
        pause = now - self._exchanged
        if pause < EXCHANGE_S:
            return
        self._exchanged = now
        for number, node in self._nodes.items():
            has_come = node.ticket is not None
            if has_come and self._store.check([f"report {node.ticket}"]):
                self._read(number, node, json.loads(self._store.get(f"report {node.ticket}")), now)
            # While this machine stood still, the others heard nothing of it, and ended their ranks.
            silence = max(now - node.since, pause)
            patience = self._policy.patience(has_come, node.ended, self._timeout)
            if not node.lost and silence > patience:
                self._lose(node, self._policy.machine_lost(number, silence))
        self._write()

    def _lose(self, node: Node, verdict: Verdict) -> None:
        node.lost = True
        self._note(verdict)
        for member, rank in node.ranks.items():
            if rank.returncode in (None, -signal.SIGKILL):
                self.lost.add(member)
            if rank.returncode is None:
                rank.send_signal(signal.SIGKILL)  # it runs if only the network failed
                rank.returncode = -signal.SIGKILL

    def _note(self, verdict: Verdict) -> None:
        """Prints the verdict; the first that ends the job is the job's failure."""
        if verdict.text:
            say(verdict.text)
        if verdict.exit_code is not None:
            self._failure = self._failure or verdict.reason

    def _read(self, number: int, node: Node, report: Mapping[str, Any], now: float) -> None:
        if report["beat"] == node.beat:
            return
        node.beat, node.since = report["beat"], now
        # That machine may be heard again before its silence has lasted long enough here. Its ranks
        # have not failed, and are not replaced: it gets new ones, as after any silence.
        if any(node.ranks[member].returncode is None for member in report["abandoned"]):
            told = f"machine {number} has ended its ranks, because it did not hear machine 0"
            self._lose(node, Verdict(text=told))
        for member, code in report["codes"].items():
            rank = node.ranks[int(member)]
            if rank.returncode is None:
                rank.returncode = code
        self.signals += report["signals"][node.signals :]
        node.signals = len(report["signals"])
        if report["failure"] is not None:
            self._note(self._policy.machine_failed(number, report["failure"]))
        node.ended, node.left = node.ended or report["ended"], report["left"]

    def admit(self, most: int = 0, running: int = 0) -> list[int]:
        """Admits machines that have arrived; returns the machine of each rank to start, if late.

        The job has `running` ranks and can use `most`, 0 until it has begun. A machine that comes
        late or again waits until then.
        """
        late: list[int] = []

        def start(number: int, count: int) -> str:
            if running + len(late) + count > most:
                return f"the job can use {most} ranks, and has {running + len(late)}"
            late.extend([number] * count)
            return ""

        now = time.monotonic()
        for number, node in self._nodes.items():
            if node.lost and most and node.is_heard(now):
                node.lost = False
                text = start(number, self._counts[number])
                say(f"machine {number} is reachable again{': ' if text else ''}{text}")
        drawn = self._store.add("tickets", 0)
        self._waiting |= dict.fromkeys(range(self._drawn + 1, drawn + 1), now)
        self._drawn = drawn
        for ticket, since in list(self._waiting.items()):
            # An agent that was stopped between two calls in `Link` leaves only a ticket.
            if self._store.check([f"arrival {ticket}"]):
                arrival = json.loads(self._store.get(f"arrival {ticket}"))
                is_late = now - since >= self._policy.restart_s
                answer = self._answer(Node(now, ticket), arrival, is_late, start if most else None)
                if answer is not None:
                    del self._waiting[ticket]
                    self._write()  # before the answer: an admitted agent looks there for its orders
                    self._store.set(f"answer {ticket}", answer)
        return late

    def _answer(
        self, new: Node, arrival: Mapping[str, Any], is_late: bool, start: Start | None
    ) -> str | None:
        """Admits a machine and returns "", or why it is refused; None while it has to wait."""
        number, counts = arrival["node"], arrival["counts"]
        node, there_are = self._nodes.get(number), len(self._counts)
        if (refusal := self._refusal(arrival)) is not None:
            there = refusal.partition(":")[0].replace(" here ", " there ")
            self._note(self._policy.machine_failed(number, there))
            return refusal
        if number > there_are:  # the machine before it may still arrive
            text = f"--node-rank is {number}, and the next machine to join is {there_are}"
            return text if is_late else None
        if node is not None and not node.lost:
            if node.ticket is None:
                node.ticket, node.since = new.ticket, new.since
                return ""
            # An agent that restarts at once is not lost yet.
            text = f"--node-rank {number} was given on two machines"
            return text if is_late else None
        refusal = start(number, counts[number]) if start is not None else None
        if refusal == "":
            self._nodes[number] = new
            if node is None:
                self._counts.append(counts[number])
            again = node is not None and node.ticket is not None
            say(f"machine {number} {'rejoined' if again else 'joined'}")
        return refusal

    def _refusal(self, arrival: Mapping[str, Any]) -> str | None:
        number, counts, elastic = arrival["node"], arrival["counts"], arrival["elastic"]
        ours = self._policy.elastic
        if elastic != ours:
            here, there = ("given" if mode else "not given" for mode in (elastic, ours))
            return f"--elastic was {here} here and {there} on machine 0: it must be the same on all"
        there_are = len(self._counts)
        # In an elastic job a new machine appends its count; one that rejoins may lack later ones.
        expected = self._counts + (counts[there_are : number + 1] if elastic else [])
        if counts != expected[: len(counts)] or len(counts) < self._at_start:
            texts = (",".join(map(str, some)) for some in (counts, self._counts))
            return "--nproc is {} here and {} on machine 0: it must be equal".format(*texts)
        for name, value in self._asked.items():
            if arrival["asked"].get(name) != value:
                return f"{name} is {arrival['asked'].get(name)} here and {value} on machine 0"
        return None

    def _write(self) -> None:
        state = {
            "orders": {node.ticket: node.orders for node in self._nodes.values()},
            "failure": self._failure,
            "end": self._end,
            "beat": self._exchanged,
        }
        self._store.set("job", json.dumps(state))


# On the other machines ----------------------------------------------------------------------------


class Link:
    """Exchanges reports and orders with machine 0, in a thread: a call to a lost store blocks.

    The constructor asks machine 0 to admit this machine; a UsageError if that refuses.
    """

    def __init__(self, store: "dist.Store", node: int, job: Job, timeout: float) -> None:
        try:
            self.ticket: str = str(store.add("tickets", 1))
            store.set(f"arrival {self.ticket}", json.dumps({"node": node} | job._asdict()))
            while not store.check([f"answer {self.ticket}"]):
                time.sleep(EXCHANGE_S)
            refusal = store.get(f"answer {self.ticket}").decode()
        except RuntimeError:  # the store is gone
            refusal = "the job ended before machine 0 admitted this machine"
        if refusal:
            raise UsageError(refusal)
        self.timeout = timeout
        self._store = store
        # The last state that machine 0 has written.
        self.job: dict[str, Any] = {"orders": {self.ticket: []}, "failure": None, "end": None}
        self.report: dict[str, Any] = {
            "codes": {},
            "abandoned": [],  # ranks that were killed because machine 0 was silent
            "signals": [],
            "failure": None,
            "ended": False,
        }
        self.heard: float = time.monotonic()  # the time of machine 0's last heartbeat
        self.is_closed: bool = False  # True once machine 0's store is gone
        self._last = False
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        reason: str | None = self.job["failure"]
        silence = time.monotonic() - self.heard
        if reason is None and self.is_closed and not self.report["ended"]:
            reason = "machine 0 no longer answers"
        elif reason is None and silence > self.timeout:
            reason = no_answer(0, silence)
        self.report["ended"] |= reason is not None
        return reason

    def tell_failure(self, text: str) -> None:
        self.report["failure"] = text  # sent with the next report

    def may_leave(self) -> bool:
        self.report["ended"] = True
        # Machine 0 may have written a failure and the end since this agent last looked.
        return self.job["failure"] is None and (self.is_closed or self.job["end"] is not None)

    def close(self, code: int) -> None:
        self.report["ended"] = self._last = True
        self._thread.join(1.0)

    def _talk(self) -> None:
        beat, key, sent = 0, f"report {self.ticket}", ""
        while True:
            last = self._last
            try:
                beat += 1
                report = json.dumps(self.report | {"beat": beat, "left": last})
                if last:
                    # One call with a reply, since machine 0 closes its store once it has read this.
                    self._store.compare_set(key, sent, report)
                    return
                self._store.set(key, report)
                sent = report
                # The reply confirms that the report has arrived.
                if self._store.check(["job"]):
                    job = json.loads(self._store.get("job"))
                    if job["beat"] != self.job.get("beat"):
                        self.heard = time.monotonic()
                    self.job = job
            except RuntimeError:  # machine 0's store is gone
                self.is_closed = True
                return
            time.sleep(EXCHANGE_S)
