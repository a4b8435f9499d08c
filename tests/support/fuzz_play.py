"""Plays a case on one rank of a real process group: with ours, and with torch's class."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp_from_scratch as ddp
from tests.support.fuzz_case import TORCHS, Backward, Case, Forward, Net, Player, State, Zero
from tests.support.terms import as_large

DIVIDED_LIMIT_S = 1.5


@dataclass
class Played:
    """What a rank held after each operation, and the error that ended it, if any."""

    states: list[State]
    error: str | None = None
    recovered: bool = True


def play(world: Any, case: Case, as_torch: bool, together: bool) -> tuple[Played, Played | None]:
    """Plays the case on this rank; with torch's class, too, if `as_torch`.

    After an error, if all ranks raise it `together`, they are to train on.
    """
    group = dist.new_group(timeout=timedelta(seconds=DIVIDED_LIMIT_S)) if case.divided else None
    model = Net(case, world.rank)
    with as_large() if case.large else nullcontext():
        player, reducers = _with_ours(world, case, model, group)
        played = _play(player)
    if played.error is not None and together:
        for reducer in reducers:
            reducer.remove()
        played.recovered = _trains_on(world, case, model)
    dist.barrier()
    if group is not None:
        dist.destroy_process_group(group)
    return played, _play(_with_torchs(world, case)) if as_torch else None


def _with_ours(
    world: Any, case: Case, model: Net, group: dist.ProcessGroup | None
) -> tuple[Player, list[ddp.Reducer]]:
    options: dict[str, Any] = {
        "bucket_cap_mb": case.bucket_cap_mb,
        "gradient_as_bucket_view": case.gradient_as_bucket_view,
        "find_unused_parameters": case.find_unused_parameters,
        "static_graph": case.static_graph,
        "fuse_wgrad": case.fuse_wgrad,
        "shared_memory": case.shared_memory,
    }
    if case.batch_norm:
        ddp.convert_sync_batchnorm(model)
    reducers: list[ddp.Reducer] = []

    def wrap() -> dict[str, Any]:
        called: Any = model
        if case.wrapped:
            called = ddp.DistributedDataParallel(model, process_group=group, **options)
            present, join = [called.reducer], called.join
        else:
            if not reducers:  # later they are equal, and graphs may be alive
                ddp.broadcast_parameters(model, process_group=group)
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            present = [
                ddp.Reducer(
                    model,
                    group,
                    overlap=case.overlap,
                    broadcast_buffers=case.broadcast_buffers,
                    ignore=ignored,
                    **options,
                )
                for ignored in ([names[::2], names[1::2]] if case.halves else [()])
            ]
            join = partial(ddp.join, present[0])
        for reducer in present:
            if case.hook is not None:
                reducer.register_comm_hook(group, HOOKS[case.hook])
            if case.straggler_every is not None:
                reducer.watch_stragglers(case.straggler_every, lambda report: None)
        reducers[:] = present  # and keeps them alive

        @contextmanager
        def no_sync() -> Iterator[None]:
            with ExitStack() as stack:
                for context in [called] if case.wrapped else present:
                    stack.enter_context(context.no_sync())
                yield

        def weigh(amount: float) -> None:
            for reducer in present:
                reducer.weight(amount)

        return {
            "called": called,
            "no_sync": no_sync,
            "weigh": weigh,
            "join": lambda initial: join(divide_by_initial_world_size=initial),
            "keep_views": lambda: [reducer.keep_bucket_views() for reducer in present],
        }

    def optimizer(parameters: Any, **settings: Any) -> Any:
        if case.flat:
            name = "NodeShared" * case.node_shared + case.optimizer
            return getattr(ddp, name)(parameters, reducer=reducers[-1], **settings)
        return TORCHS[case.optimizer](parameters, **settings)

    def again(player: Player) -> None:
        for reducer in reducers:
            reducer.remove()
        for name, value in wrap().items():
            setattr(player, name, value)
        if case.flat:
            state = player.optimizer.state_dict()
            player.optimizer = optimizer(player.parameters, **case.optimizer_settings)
            player.optimizer.load_state_dict(state)

    return Player(case, world.rank, model, **wrap(), optimizer=optimizer, again=again), reducers


def in_halves(group: Any, bucket: Any) -> Any:
    """A hook that starts a second collective when the first has landed."""
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    first, *second = buffer.chunk(2)

    def send_second(future: Any) -> torch.Tensor:
        future.value()
        for half in second:
            dist.all_reduce(half, group=group)
        return buffer

    return dist.all_reduce(first, group=group, async_op=True).get_future().then(send_second)


def gathered(group: Any, bucket: Any) -> Any:
    """A hook that sends no sum, and whose average is another tensor."""
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, buffer.mul_(1.0 / len(parts)), group=group, async_op=True)

    def add(future: Any) -> torch.Tensor:
        future.value()
        return sum(parts[1:], parts[0])

    return work.get_future().then(add)


HOOKS = {
    "allreduce_hook": ddp.comm_hooks.allreduce_hook,
    "torch's allreduce_hook": default_hooks.allreduce_hook,
    "in_halves": in_halves,
    "gathered": gathered,
}


def _with_torchs(world: Any, case: Case) -> Player:
    model = Net(case, world.rank)
    wrapper = torch.nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=1e-5,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        find_unused_parameters=case.find_unused_parameters,
        static_graph=case.static_graph,
    )
    wrapper.broadcast_buffers = wrapper.forward_sync_buffers = case.sends_buffers
    return Player(case, world.rank, model, wrapper, wrapper.no_sync)


def _play(player: Player) -> Played:
    played = Played([])
    for number, op in enumerate(player.case.operations):
        try:
            player.play(number, op)
        except Exception as error:  # noqa: BLE001  # the oracle says which are right
            played.error = f"{type(error).__name__}: {error}"
            break
        played.states.append(player.state())
    return played


def _trains_on(world: Any, case: Case, model: Net) -> bool:
    """Whether a new Reducer averages what the ranks compute."""
    model.eval().requires_grad_()  # buffers stay
    model.checkpoint = None  # which may want a static graph
    reducer = ddp.Reducer(model, find_unused_parameters=True)
    player = Player(case, world.rank, model)
    forward = Forward((tuple(range(len(case.branches))),) * case.world_size)
    gradients = []
    for _ in range(2):
        for op in (Zero(), forward, Backward()):
            player.play(0, op)
        gradients.append([p.grad for p in player.parameters if p.grad is not None])
        reducer.remove()
    for gradient in gradients[1]:
        gradient /= world.world_size
        dist.all_reduce(gradient)
    return all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(*gradients, strict=True))
