"""Training steps that are attempted again when a rank is lost."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.group import of_member
from ddp_from_scratch.launch.rank_process import is_communication_error
from ddp_from_scratch.membership import Membership, hand_on
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.waiting import wait
from ddp_from_scratch.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class ElasticRun:
    """Steps of a run that continues without the ranks that it loses; see `elastic`."""

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
        # True once this attempt's optimizer has stepped: then the step is finished.
        self._stepped = False
        optimizer.register_step_post_hook(self._note_step)
        # 1 once the generation is over for some rank, when `_exchange` has ended.
        self._over = torch.zeros(1, dtype=torch.int64)
        self._exchange: dist.Work | None = None

    @property
    def world(self) -> World:
        """This rank's present place."""
        return self._membership.world

    def attempts(self, steps: int) -> Iterator[AbstractContextManager[None]]:
        """Yields a context for each attempt at a step, until `steps` are finished.

        A rank that is lost breaks an attempt off on all ranks; the next one is at the same step.
        What is inside the context must end with the optimizer's step, and may change nothing that
        outlives it but what the run was made of.
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
            self._ask()
            yield
            # Finished: what may fail now is only the exchange for the next step.
            self._stepped = True
            self._answer()
        except Exception as error:
            if not self._can_recover(error):
                self._membership.note_failure(self.step, error)
                raise
            self._lose(error)
        # With the averages of all ranks behind it, a step counts also if peers are lost after it:
        # they get its result from this rank.
        if self._stepped:
            self.step += 1

    def _ask(self) -> None:
        """Begins to exchange whether the generation is over for some rank."""
        if self._membership.elastic:
            # New: one that was broken off may still write to the last one.
            self._over = torch.tensor([int(self._membership.is_over)])
            # Asynchronous: the step hides it.
            self._exchange = dist.all_reduce(self._over, dist.ReduceOp.MAX, async_op=True)

    def _answer(self) -> None:
        """Leaves the group on all ranks behind the same step, if it is over."""
        if self._exchange is not None:
            wait(self._exchange)
            self._exchange = None
            if self._over.item():
                self._membership.leave()

    def _lose(self, error: Exception) -> None:
        """Drops all that holds the group's connections, and then the group."""
        self._exchange = None
        self._reducer.abort_step()
        self._membership.lose(error)

    def _join(self) -> None:
        """Meets the others and takes rank 0's state, until that succeeds."""
        while not self._membership.in_group:
            try:
                meeting = self._membership.meet(self.step)
                if not meeting.alike:
                    self._take_state(meeting.source or 0)
                self._membership.note_state()
            except Exception as error:
                if not self._can_recover(error):
                    raise
                self._lose(error)
            self._reducer.set_step(self.step)

    def _take_state(self, source: int) -> None:
        """Gives all ranks this one's parameters, buffers, step and other states. Collective."""
        module = self._reducer.module
        # Not its `state_dict`, which lacks buffers that are not persistent.
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
        """Meets the others behind the last step; False if one of them was lost before."""
        try:
            wait(of_member(dist.barrier(async_op=True)))
        except Exception as error:
            if not self._can_recover(error):
                raise
            self._lose(error)
            return False
        return True

    def _can_recover(self, error: Exception) -> bool:
        return self._membership.elastic and is_communication_error(error)

    def _note_step(self, *_: object) -> None:
        if self._stepped:
            # One that was lost between the two could not be told from one behind both.
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

    Start it with `ddp.start_ranks(command, [4], max_restarts=3)`. There each process is alone until
    the first attempt. A rank that is lost there breaks the attempt off: the others drop what they
    have of it, open a group without that rank, share the virtual ranks out among themselves and
    repeat the step. The process that is started in its place joins at the end of a step, and takes
    parameters, buffers and the states of `optimizer` and `others` from a rank that has them. Under
    any other launcher the first lost rank ends the run, as it does elsewhere.

    Args:
        world: that of `process_group("gloo")`.
        reducer: with `virtual_ranks`; so that no sample is lost or seen twice.
        optimizer: steps once in each attempt, at its end.
        others: what else has a `state_dict` that the run needs, but no second optimizer: a
            step that only one of them has taken can be neither repeated nor finished.
        timeout: seconds that a collective may take.

    Raises:
        UsageError: the backend is not gloo.
        TypeError: an optimizer is among the others.
        RuntimeError: the reducer has no virtual ranks. From `optimizer.step()`: its second in an
            attempt.
    """
    if world.backend != "gloo":
        raise UsageError(f"ddp.elastic needs gloo, and the backend is {world.backend}")
    # Raises without virtual ranks: on fewer ranks a step would have fewer samples.
    _ = reducer.virtual_rank_range
    if any(isinstance(one, torch.optim.Optimizer) for one in others):
        raise TypeError(
            "ddp.elastic takes one optimizer, which steps once in an attempt: give it all "
            "parameters, in groups where they need settings of their own"
        )
    return ElasticRun(world, reducer, optimizer, *others, timeout=timeout)
