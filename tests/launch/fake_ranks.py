"""An agent whose ranks are fakes, on a fake clock: nothing is started, and nothing takes time.

    job.run(Agent(["true"], rank_of, range(1)), "wait 3 | ends 0 KILL") == 137

Before each poll the next event happens, a method of `FakeJob`; `&` joins events between polls.
"""

import signal

import torch.distributed as dist

from ddp_from_scratch.launch import agent, elastic_agent, nodes
from ddp_from_scratch.launch.job_store import JobStore

LIMIT_S = 10.0  # more than any time that a agent waits by itself


def number_of(text):
    return signal.Signals[f"SIG{text}"]


class Rank:
    """In the place of a process. A signal ends it, unless it ignores that one."""

    def __init__(self, job, environ):
        self._job, self.environ = job, environ
        self.pid = self.code = None
        self.ignored = {0}
        self.signals = []

    def poll(self):
        return self.code

    def wait(self):
        assert self.code is not None, "the agent would wait for ever"
        return self.code

    def send_signal(self, number):
        assert self.code is None
        self.signals.append((int(number), self._job.now))
        if number not in self.ignored:
            self.code = -number

    def __str__(self):
        text, before = [], float("inf")
        for number, now in self.signals:
            text += ["5s"] * (now - before >= 5.0) + [signal.Signals(number).name[3:]]
            before = now
        return " ".join(text) or "-"


class StillRuns(Exception):
    pass


class FakeJob:
    def __init__(self, monkeypatch):
        self.now, self._until, self._events = 100.0, 100.0, iter(())
        self.ranks = []
        self.on_start = lambda: None
        self.said = JobStore(dist.HashStore())
        self.link = None  # to machine 0
        # The agents of other machines, for `Agent`.
        self.elsewhere, self.told, self.may_all_leave = None, [], False
        for module in (agent, elastic_agent, nodes):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(agent, "subprocess", self)
        monkeypatch.setattr(agent, "_is_stopped", lambda rank: False)

    def run(self, agent, events=""):
        """The agent's exit code; None where it still runs after the last event."""

        def all_events():
            for group in filter(None, events.split(" | ")):
                for event in group.split(" & "):
                    name, *arguments = event.split()
                    if name == "wait":
                        yield float(*arguments)
                    else:
                        getattr(self, name)(*arguments)
                yield 0.0
            yield LIMIT_S

        self._events = all_events()
        try:
            return agent.run()
        except StillRuns:
            return None

    def signals(self):
        return ", ".join(map(str, self.ranks))

    # As the modules time and subprocess.

    DEVNULL = None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now < self._until:
            return
        delay = next(self._events, None)
        if delay is None:
            self._until = float("inf")
            raise StillRuns
        self._until = self.now + delay

    def Popen(self, command, env, **_):
        self.on_start()
        self.ranks.append(Rank(self, env))
        return self.ranks[-1]

    # As the agents of other machines (`MachineRegistry`, `Link`).

    def may_leave(self):
        return self.may_all_leave

    def failure(self):
        return self.elsewhere

    def tell_failure(self, text):
        self.told.append(text)

    def close(self, code):
        self.closed_with = code

    # Events: ranks are digits.

    def ends(self, ranks, code):
        for rank in map(int, ranks):
            self.ranks[rank].code = int(code) if code.isdigit() else -number_of(code)

    def ignore(self, ranks, *names):
        for rank in map(int, ranks):
            self.ranks[rank].ignored.update(map(number_of, names))

    def gets(self, name):
        signal.raise_signal(number_of(name))

    def fails_elsewhere(self):
        self.elsewhere = "machine 1: rank 2 was killed by SIGKILL"

    def done_elsewhere(self):
        self.may_all_leave = True

    def says(self, member, **said):
        self.said.say(int(member), self.said.member(int(member))._replace(**said))

    def train(self, members):
        """They have joined the present generation, and have a state that 8 ranks can use."""
        for member in members:
            self.says(member, joined=self.said.generation.number, step=0, max_world_size=8)

    def arrives(self, member):
        self.says(member, joined=self.said.generation.number)

    def asks(self, member):
        self.says(member, wants=self.said.generation.number + 1)

    def raises(self, member, step, text):
        self.arrives(member)
        self.says(member, failure=[int(step), text])
        self.ranks[int(member)].code = 1

    def generation(self, number, members):
        now = self.said.generation
        assert (now.number, now.members) == (int(number), [*map(int, members)])

    def stands_still(self, seconds):
        """The agent and its ranks, all at once."""
        self.now += float(seconds)

    # Events of another machine.

    def hears(self, *more, end=None, ticket="7"):
        """The orders of machine 0: to start ranks 1 and 2, and one more."""
        orders = [("start", 1, 0), ("start", 2, 0)]
        if more:
            orders.append((more[0], int(more[1]), number_of(more[2]) if more[2:] else 0))
        self.link.job = {"end": end, "orders": {ticket: orders}}

    def hears_the_end(self, code):
        self.hears(end=int(code))

    def hears_of_another(self):
        self.hears(ticket="8")

    def silence(self, silent):
        self.link.silent_since = {"begins": self.now, "ends": float("inf")}[silent]

    def reported(self, name):
        assert self.link.report["signals"] == [number_of(name)]
