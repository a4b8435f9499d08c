"""The agents of all machines except machine 0; `nodes.py` describes the messages between them."""

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.agent import Agent, say
from ddp_from_scratch.launch.nodes import EXCHANGE_S, LOST_S, no_answer

if TYPE_CHECKING:
    import torch.distributed as dist


def arrive(
    store: "dist.Store", node: int, counts: Sequence[int], elastic: bool, asked: Mapping[str, str]
) -> int:
    """Asks machine 0 to admit this machine; returns the ticket of this agent."""
    arrival = {"node": node, "counts": list(counts), "elastic": elastic, "asked": dict(asked)}
    try:
        ticket: int = store.add("tickets", 1)
        store.set(f"arrival {ticket}", json.dumps(arrival))
        while not store.check([f"answer {ticket}"]):
            time.sleep(EXCHANGE_S)
        text = store.get(f"answer {ticket}").decode()
    except RuntimeError:  # the store is gone
        text = "the job ended before machine 0 let this machine in"
    if text:
        raise UsageError(text)
    return ticket


class Link:
    """Exchanges reports and orders with machine 0, in a thread: a call to a lost store blocks."""

    def __init__(self, store: "dist.Store", ticket: int, timeout: float) -> None:
        self.ticket, self.timeout, self._store = ticket, timeout, store
        self.job: dict[str, Any] | None = None  # the last job state that machine 0 has written
        self.report: dict[str, Any] = {"codes": {}, "signals": [], "failure": None, "ended": False}
        self.heard = time.monotonic()  # the time of machine 0's last heartbeat
        self.is_closed = False  # True once machine 0's store is gone
        self._last = False
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        reason: str | None = None if self.job is None else self.job["failure"]
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
        return self.is_closed or (self.job is not None and self.job["end"] is not None)

    def close(self, code: int) -> None:
        self.report["ended"] = self._last = True
        self._thread.join(1.0)

    def _talk(self) -> None:
        beat = 0
        while True:
            last = self._last
            try:
                beat += 1
                report = self.report | {"beat": beat, "left": last}
                self._store.set(f"report {self.ticket}", json.dumps(report))
                # The reply confirms that the report has arrived.
                if self._store.check(["job"]) and not last:
                    job = json.loads(self._store.get("job"))
                    if self.job is None or job["beat"] != self.job["beat"]:
                        self.heard = time.monotonic()
                    self.job = job
            except RuntimeError:  # machine 0's store is gone
                self.is_closed = True
                return
            if last:
                return
            time.sleep(EXCHANGE_S)


class NodeAgent(Agent):
    """The agent of an elastic job on a machine other than machine 0."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[int], dict[str, str]],
        link: Link,
        preload: Sequence[str] = (),
    ) -> None:
        super().__init__(command, environment, (), preload, link)
        self._link, self._done = link, 0  # orders obeyed so far

    def _watch(self) -> int:
        """Obeys machine 0 until it ends the job; returns the exit code."""
        cut_off = False
        link = self._link
        while True:
            self._report()
            if self._server_code() is not None and not self._received:
                return self._failed(0, 1)
            silence = time.monotonic() - link.heard
            if link.is_closed or silence > link.timeout:
                say("machine 0 no longer answers: all ranks here were stopped")
                return 1
            if silence > LOST_S and not cut_off:
                say(f"machine 0 has not answered for {silence:.0f} s: ending the ranks here")
                self._signal(signal.SIGKILL)
            cut_off = silence > LOST_S
            if self._ended_by:
                return self._ended()
            # Machine 0 forwards the first signal to all ranks.
            if len(self._received) > (0 if cut_off else 1):
                return self._stopped()
            if link.job is not None and not cut_off:
                if link.job["end"] is not None:
                    return int(link.job["end"])
                orders = link.job["orders"].get(str(link.ticket))
                if orders is None:
                    say("another command has taken this machine's place: its ranks were stopped")
                    return 1
                for kind, member, argument in orders[self._done :]:
                    self._done += 1
                    if kind == "start":
                        self._start(member)
                    elif self._children[member].poll() is None:
                        self._children[member].send_signal(argument)
            self._kill_stopped()
            time.sleep(EXCHANGE_S / 2)

    def _report(self) -> None:
        codes = {member: child.poll() for member, child in self._children.items()}
        # If the fork server is lost, machine 0 must not hear that its ranks are: it would replace
        # them on this machine. It loses the whole machine instead, as if it were switched off.
        if self._server_code() is None:
            self._link.report |= {"codes": codes, "signals": list(self._received)}

    def _end_all(self) -> None:
        super()._end_all()
        self._report()
