"""Repeats a training step when a rank is lost during it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.group import wait
from ddp_from_scratch.launch.rank_process import is_communication_error
from ddp_from_scratch.membership import Membership, hand_on
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class ElasticRun:
    """The steps of a run that continues without lost ranks; see `elastic`."""

    def __init__(
        self,
        world: World,
        reducer: Reducer,
        optimizer: torch.optim.Optimizer,
        *others: "Stateful",
        timeout: float,
    ) -> None:
        self.step = 0  # the number of steps that are finished
        self._membership = Membership(world, reducer.virtual_rank_count, timeout)
        self._reducer = reducer
        self._stateful: list[Stateful] = [optimizer, *others]
        self._stepped = False  # True once the optimizer has stepped, which finishes the step
        optimizer.register_step_post_hook(self._note_step)
        self._exchange: dist.Work | None = None

    @property
    def world(self) -> World:
        return self._membership.world

    def attempts(self, steps: int) -> Iterator[AbstractContextManager[None]]:
        """Yields a context manager for each attempt at a step, until `steps` are finished.

        A lost rank ends the attempt on all ranks, and the next attempt repeats the step. The block
        must end with the optimizer's step, and may change no lasting state outside the run.
        """
        while True:
            self._join()
            if self.step < steps:
                yield self._attempt()
            elif self._end():
                return

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        self._stepped = False
        try:
            with self._recovering():
                if self._membership.elastic:
                    # Whether the generation is over for some rank. A new tensor: an aborted
                    # exchange may still write to the old one.
                    over = torch.tensor([int(self._membership.is_over)])
                    self._exchange = dist.all_reduce(over, dist.ReduceOp.MAX, async_op=True)
                yield
                # The step is finished; only the exchange for the next step may fail now.
                self._stepped = True
                if self._exchange is not None:
                    wait(self._exchange)
                    self._exchange = None
                    if over.item():  # on all ranks after the same step
                        self._membership.leave()
        except Exception as error:
            self._membership.note_failure(self.step, error)
            raise
        # A step with the averages of all ranks counts, even if peers are lost: they get its result.
        if self._stepped:
            self.step += 1

    def _join(self) -> None:
        """Meets the other ranks and takes over the newest state; retries until that succeeds."""
        while not self._membership.in_group:
            with self._recovering():
                meeting = self._membership.meet(self.step)
                if not meeting.same_state:
                    self._take_state(meeting.source or 0)
                self._membership.note_state()
            self._reducer.set_step(self.step)

    def _take_state(self, source: int) -> None:
        """Sends the parameters, buffers, step and other states of rank `source`. Collective."""
        module = self._reducer.module
        # `state_dict` lacks non-persistent buffers.
        tensors = {name: t.detach() for name, t in _tensors(module)}
        mine = self.step, tensors, [one.state_dict() for one in self._stateful]
        self.step, tensors, states = hand_on(mine, source)
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
            if not self._membership.elastic or not is_communication_error(error):
                raise
            self._exchange = None
            self._reducer.abort_step()
            self._membership.lose(error)

    def _note_step(self, *_: object) -> None:
        if self._stepped:
            # A rank lost between the two steps would look like one that took both.
            raise RuntimeError("the optimizer steps twice in an attempt, which is one step")
        self._stepped = True


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def elastic(
    world: World,
    reducer: Reducer,
    optimizer: torch.optim.Optimizer,
    *others: "Stateful",
    timeout: float = 600.0,
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
                    for virtual_rank in reducer.virtual_rank_range:
                        with reducer.virtual_rank(virtual_rank):
                            loss_of(model, run.step, virtual_rank).backward()
                    optimizer.step()

    Start it with `ddp.start_ranks(command, [4], max_restarts=3)`, under which each process is alone
    until the first attempt. When a rank is lost, the others drop the attempt, open a group without
    that rank, redistribute the virtual ranks and repeat the step. The replacement process joins at
    the end of a step, and takes parameters, buffers and the states of `optimizer` and `others` from
    a rank that has them. Under any other launcher the first lost rank ends the run.

    Args:
        world: that of `process_group("gloo")`; else a UsageError.
        reducer: one with `virtual_ranks`, so that no sample is lost or seen twice.
        optimizer: steps once in each attempt, at its end; the second raises a RuntimeError.
        others: other objects with a `state_dict` that the run needs, but no second optimizer (a
            TypeError): a step that only one of two has taken can be neither repeated nor finished.
        timeout: seconds that a collective may take.
    """
    if world.backend != "gloo":
        raise UsageError(f"ddp.elastic needs gloo, and the backend is {world.backend}")
    _ = reducer.virtual_rank_range  # raises without it: fewer ranks would see fewer samples
    if any(isinstance(one, torch.optim.Optimizer) for one in others):
        raise TypeError(
            "ddp.elastic takes one optimizer, which steps once in an attempt: give it all "
            "parameters, in groups where they need settings of their own"
        )
    return ElasticRun(world, reducer, optimizer, *others, timeout=timeout)
