"""Repeats a training step when a rank is lost during it, in a new group of the other ranks."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddp_from_scratch.common.errors import CommunicationError, UsageError, WrongResultError
from ddp_from_scratch.common.group import set_failure_detector, wait
from ddp_from_scratch.common.state import broadcast_state
from ddp_from_scratch.launch.environment import MACHINE_0, MEMBER, RENDEZVOUS_FILE
from ddp_from_scratch.launch.job_store import NO_STATE, FileStore, Generation, JobStore, Member
from ddp_from_scratch.launch.rank_process import is_communication_error
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.world.closing import (
    abort_on_lost_rank,
    clear_tracebacks,
    close_default_group,
)
from ddp_from_scratch.world.world import World, replace_group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

Result = TypeVar("Result")

# Seconds to connect once all have arrived; if one dies, gloo's retries take up to 5 times as long.
# Doubled after each failure, for slow machines.
_CONNECT_S = 0.5
_GROUP_STORE_TIMEOUT = timedelta(seconds=10)
# The agent answers while it lives, and ends its ranks when machine 0's no longer answers.
_JOB_STORE_TIMEOUT = timedelta(days=1)
_POLL_S = 0.005


class GenerationState(NamedTuple):
    """The state of the ranks that meet in a new generation."""

    source: int | None  # the first rank with the most finished steps; None if no rank has state
    same_state: bool  # True if all have finished the same number of steps


def _tcp_store(timeout: timedelta) -> dist.TCPStore:
    # On machine 0; the agents of several machines share it.
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)


def job_store() -> JobStore:
    """Returns the store for messages between this job's agent and its processes."""
    if MACHINE_0 in os.environ:
        return JobStore(_tcp_store(_JOB_STORE_TIMEOUT))
    return JobStore(FileStore(Path(os.environ[RENDEZVOUS_FILE]).parent))


class Membership:
    """The place of this process in its job's generations (`launch/job_store.py`).

    Each process begins in a group of its own, so it can build its model without the others. At most
    `max_world_size` ranks can share a step; a collective may take `timeout` seconds.
    """

    def __init__(self, world: World, max_world_size: int, timeout: float) -> None:
        self.world: World = world
        self._max_world_size, self._timeout = max_world_size, timedelta(seconds=timeout)
        self.elastic: bool = MEMBER in os.environ  # lost ranks are replaced; else one generation
        if self.elastic:
            self._store = job_store()
        self._number = int(os.environ.get(MEMBER, "0"))
        self._said = Member()
        self._generation = Generation()
        self._connect_s = _CONNECT_S

    @property
    def in_group(self) -> bool:
        return not self.elastic or (self._generation.number > 0 and dist.is_initialized())

    @property
    def generation(self) -> int:
        return self._generation.number

    @property
    def is_over(self) -> bool:
        """True once a later generation is announced. Only rank 0 looks, and tells the others."""
        if not self.elastic or self.world.rank:
            return False
        return self._store.generation.number > self._generation.number

    def meet(self, step: int) -> GenerationState:
        """Opens the group of the next generation, after `step` finished steps. Collective."""
        if dist.is_initialized():
            self.close()
        while True:
            generation = self._arrive(step if self._said.max_world_size else NO_STATE)
            rank = generation.members.index(self._number)
            connect = timedelta(seconds=self._connect_s)
            try:
                store = self._group_store(generation)
                self.world = replace_group(self.world, store, rank, generation.machines, connect)
            except RuntimeError as error:  # a member has just died
                self._connect_s *= 2
                self.close(error)
                self._ask_for_next(generation)
                continue
            self._connect_s = _CONNECT_S
            self._generation = generation
            assert dist.group.WORLD is not None, "it has just been opened"
            dist.group.WORLD.set_timeout(self._timeout)
            is_broken = partial(self._is_broken, generation)
            set_failure_detector(is_broken)
            abort_on_lost_rank(dist.group.WORLD, is_broken)
            steps, last = generation.steps, max(generation.steps)
            source = None if last == NO_STATE else steps.index(last)
            return GenerationState(source, same_state=source is not None and min(steps) == last)

    def note_state(self) -> None:
        """Tells the agent that this process has state with which others can continue."""
        self._say(max_world_size=self._max_world_size)

    def close(self, error: BaseException | None = None) -> None:
        """Closes the group, so that peers that wait for this rank fail at once."""
        clear_tracebacks(error)  # the group closes with its last reference, and frames hold many
        if dist.is_initialized():
            close_default_group()

    def rejoin(self, error: BaseException) -> None:
        """Closes the group after `error`, and waits until the agent announces the next one."""
        self.close(error)
        self._ask_for_next(self._generation)

    def note_failure(self, step: int, error: BaseException) -> None:
        is_peers = isinstance(error, CommunicationError)
        wrong = isinstance(error, WrongResultError) and error.rank is not None and not is_peers
        self._say(failure=[step, f"{type(error).__name__}: {error}"], wrong=wrong)
        if self.elastic:
            self.close()

    def _say(self, **said: Any) -> None:
        self._said = self._said._replace(**said)
        if self.elastic:
            self._store.say(self._number, self._said)

    def _group_store(self, generation: Generation) -> dist.Store:
        number = generation.number
        if MACHINE_0 in os.environ:
            store = _tcp_store(_GROUP_STORE_TIMEOUT)
            return dist.PrefixStore(f"generation {number}", store)
        file = Path(os.environ[RENDEZVOUS_FILE]).with_name(f"store-{number}")
        return dist.FileStore(str(file), len(generation.members))

    def _is_broken(self, generation: Generation) -> bool:
        try:
            last = self._store.generation
            left = not {*generation.members} <= {*last.members}
            return last.number > generation.number and (last.started or left)
        except (OSError, RuntimeError):  # the store is gone, and with it the job
            return True

    def _arrive(self, step: int) -> Generation:
        """Waits for all processes of the latest generation; returns it, with their steps."""
        while True:
            generation = self._store.generation
            is_new = generation.number > self._generation.number
            if not is_new or self._number not in generation.members:
                self._ask_for_next(generation)
                continue
            self._say(joined=generation.number, step=step)
            while (last := self._store.generation).number == generation.number:
                if last.steps:
                    return last
                time.sleep(_POLL_S)

    def _ask_for_next(self, generation: Generation) -> None:
        self._say(wants=generation.number + 1)
        while self._store.generation.number <= generation.number:
            time.sleep(_POLL_S)


class Regrouping(NamedTuple):
    """When a rank left a group and joined the next. Times are those of `time.monotonic`."""

    left: float
    joined: float
    kept: int  # virtual ranks of the step in progress that need not run again, on all ranks


class ElasticRun:
    """The steps of a run that continues without lost ranks; see `elastic`."""

    def __init__(
        self,
        membership: Membership,
        reducer: Reducer,
        optimizer: Optimizer,
        *others: "Stateful",
        on_regroup: Callable[[bool], None] | None = None,
    ) -> None:
        self.step: int = 0  # the number of steps that are finished
        self.epochs: int = 0  # how many of them were ends of epochs, without an optimizer's step
        self.regrouping: Regrouping | None = None  # None in this rank's first group
        self._has_joined = False
        self._left: float | None = None  # when this rank left its last group
        self._on_regroup = on_regroup
        self._membership, self._reducer = membership, reducer
        self._stateful: list[Stateful] = [optimizer, *others]
        # True once the optimizer has stepped, which finishes the attempt.
        self._stepped = False
        self._repeats = False  # True in `repeat`, whose function takes many steps
        optimizer.register_step_post_hook(self._note_step)
        self._exchange: dist.Work | None = None

    @property
    def world(self) -> World:
        return self._membership.world

    @property
    def generation(self) -> int:
        """How many groups the run has had: 1 in the first one; 0 before it and without an agent."""
        return self._membership.generation

    def repeat(self, function: Callable[[], Result]) -> Result:
        """Calls a function that takes many steps; calls it again when a rank is lost in it.

        For a loop that `attempts` does not fit. The function begins at `step`, and adds 1 to it
        after each optimizer step. If the end of an epoch must not be repeated, it counts as a step,
        and also in `epochs`. All ranks count equally. Without an `exchange` in each step no process
        can join. If no rank may continue alone afterwards, end the function with a collective.
        """
        self._repeats = True
        try:
            while True:
                self._join()
                try:
                    return function()
                except Exception as error:
                    # Not `_recovering`, which would hold the frames of `function`, and so the
                    # group's connections, until the other ranks are met again.
                    if not self._recovers(error):
                        raise
        except Exception as error:
            self._membership.note_failure(self.step, error)
            raise
        finally:
            self._repeats = False

    def attempts(self, steps: int) -> Iterator[AbstractContextManager[None]]:
        """Yields a context manager for each attempt at a step, until `steps` are finished.

        A lost rank ends the attempt on all ranks, and the next attempt repeats the step. The block
        must end with the optimizer's step, and must not change lasting state outside the run.
        """
        while True:
            self._join()
            if self.step < steps:
                yield self._attempt()
            elif self._end():
                return

    def exchange(self, *flags: int) -> Callable[[], list[int]]:
        """Starts the exchange of a step; returns a function that waits for it, at the step's end.

        For a function of `repeat`; `attempts` does it by itself. Collective. A flag is a number
        from 0 up, such as the number of a signal, which may reach only some ranks. Call the
        returned function once: it returns the highest value of each flag over all ranks. If all are
        0, and processes wait to join or have been lost, it raises a CommunicationError on all
        ranks.
        """
        if self._exchange is not None:
            raise RuntimeError(
                "run.exchange() inside of a step that has begun one: run.attempts() does it by "
                "itself, so call it only in the function of run.repeat(), once in each step"
            )
        # A new tensor: an aborted exchange may still write to the old one.
        mine = [*flags, int(self._membership.is_over)]
        highest = torch.tensor(mine, dtype=torch.int64, device="cpu")
        self._exchange = dist.all_reduce(highest, dist.ReduceOp.MAX, async_op=True)

        def answer() -> list[int]:
            wait(self._exchange)
            self._exchange = None
            *of_all, is_over = highest.tolist()
            if is_over and not any(of_all):
                raise CommunicationError("processes are to join the group, or have left it")
            return of_all

        return answer

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        self._stepped = False
        try:
            with self._recovering():
                answer = self.exchange() if self._membership.elastic else None
                yield
                # The step is finished; only the exchange for the next step may fail now.
                self._stepped = True
                if answer is not None:
                    answer()
        except Exception as error:
            self._membership.note_failure(self.step, error)
            raise
        # A step with the averages of all ranks counts, even if peers are lost: they get its result.
        if self._stepped:
            self.step += 1

    def _join(self) -> None:
        """Meets the other ranks and takes over the newest state; retries until that succeeds."""
        if not (self._membership.elastic or self._has_joined or self._on_regroup is None):
            # Without an agent the ranks have met already.
            self._on_regroup(False)
            self._take_state(0)
            self._reducer.set_step(self.step - self.epochs)
            self._has_joined = True
        while not self._membership.in_group:
            with self._recovering():
                meeting = self._membership.meet(self.step)
                if self._on_regroup is not None:
                    self._on_regroup(meeting.source is not None)
                if not meeting.same_state:
                    self._take_state(meeting.source or 0)
                self._membership.note_state()
                first = self.step - self.epochs
                kept = self._reducer.set_step(first, keep=meeting.same_state)
                if self._left is not None:
                    self.regrouping = Regrouping(self._left, time.monotonic(), kept)
                    self._left = None
                self._has_joined = True

    def _take_state(self, source: int) -> None:
        """Sends the parameters, buffers, step and other states of rank `source`. Collective."""
        module = self._reducer.module
        # `state_dict` lacks non-persistent buffers.
        tensors = {name: t.detach() for name, t in _tensors(module)}
        mine: Any = None
        if self.world.rank == source:
            states = [one.state_dict() for one in self._stateful]
            mine = self.step, self.epochs, tensors, states
        self.step, self.epochs, tensors, states = broadcast_state(mine, source)
        if self.world.rank != source:
            with torch.no_grad():
                for name, tensor in _tensors(module):
                    tensor.copy_(tensors[name])
            for one, state in zip(self._stateful, states, strict=True):
                one.load_state_dict(state)

    def _end(self) -> bool:
        """Meets the other ranks after the last step; False if one was lost before."""
        with self._recovering():
            wait(dist.barrier(async_op=True))
            return True
        return False

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """On a lost rank, drops everything that holds the group's connections, then the group."""
        try:
            yield
        except Exception as error:
            if not self._recovers(error):
                raise

    def _recovers(self, error: Exception) -> bool:
        """Leaves the group if the error says that a rank is lost; returns False for any other."""
        if not self._membership.elastic or not is_communication_error(error):
            return False
        if isinstance(error, WrongResultError) and error.rank is None:
            return False  # nobody knows which rank must leave
        if self._has_joined and self._left is None:
            self._left = time.monotonic()
        self._exchange = None
        self._reducer.abort_step()
        self._membership.rejoin(error)
        return True

    def _note_step(self, *_: object) -> None:
        if self._repeats:
            return
        if self._stepped:
            # A rank lost between the two steps would look like one that took both.
            raise RuntimeError("the optimizer steps twice in one attempt: it may step once")
        self._stepped = True


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def elastic(
    world: World,
    reducer: Reducer,
    optimizer: Optimizer,
    *others: "Stateful",
    timeout: float = 600.0,
    on_regroup: Callable[[bool], None] | None = None,
) -> ElasticRun:
    """Returns a run that continues when a rank is lost, with the bits of one that lost none.

        with ddp.process_group("gloo") as world:
            model = Net()
            reducer = ddp.Reducer(model, virtual_ranks=8)
            optimizer = ddp.SGD(model.parameters(), lr=0.1, reducer=reducer)
            run = ddp.elastic(world, reducer, optimizer)
            for attempt in run.attempts(1000):
                with attempt:
                    optimizer.zero_grad()
                    reducer.run_virtual_ranks(lambda v: loss_of(model, run.step, v).backward())
                    optimizer.step()

    Start it with `ddp.start_ranks(command, [4], max_restarts=3)`. Each process then runs alone
    until the first attempt. When a rank is lost, the others drop the attempt and open a group
    without that rank. They divide the virtual ranks that none of them has finished in
    `run_virtual_ranks`, and complete the step. The replacement process joins at the end of a step,
    and takes parameters, buffers and the states of `optimizer` and `others` from a rank that has
    them. Under any other launcher the first lost rank ends the run.

    Args:
        world: the result of `process_group("gloo")`; any other raises a UsageError.
        reducer: a Reducer with `virtual_ranks`, so that no sample is lost or seen twice.
        optimizer: steps once in each attempt, at its end; a second step raises a RuntimeError.
            shard="world" raises a ValueError: the state of a lost rank would be lost, too.
        others: other objects with a `state_dict` that the run needs. States must consist of tensors
            and plain values, or a rank that joins raises a UsageError. A second optimizer raises a
            TypeError: a step that only one of two has taken can be neither repeated nor finished.
        timeout: seconds that a collective may take.
        on_regroup: called on all ranks as soon as they have met in a group, and before they take
            over a state. Its argument is True if a rank has a state; if not, all take over rank
            0's, which the function may read from a checkpoint. `run.world` is then this rank's
            place in the group. The first group counts, even where no agent replaces lost ranks.
    """
    if world.backend != "gloo":
        raise UsageError(f"ddp.elastic needs gloo, and the backend is {world.backend}")
    if not isinstance(reducer, Reducer):
        raise TypeError(
            f"ddp.elastic takes a ddp.Reducer with virtual_ranks=V, got {type(reducer).__name__}"
        )
    _ = reducer.virtual_rank_range  # raises without it: fewer ranks would see fewer samples
    if any(isinstance(one, Optimizer) for one in others):
        raise TypeError(
            "ddp.elastic takes one optimizer, which steps once in an attempt: give it all "
            "parameters, in groups where they need settings of their own"
        )
    if getattr(optimizer, "shard", "none") == "world":
        raise ValueError(
            'with shard="world" each rank has its share of the optimizer\'s state, which is lost '
            'with it: use shard="none"'
        )
    membership = Membership(world, reducer.virtual_rank_count, timeout)
    return ElasticRun(membership, reducer, optimizer, *others, on_regroup=on_regroup)
