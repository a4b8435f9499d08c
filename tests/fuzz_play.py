"""Plays a case on one rank of a real process group: with ours, and with torch's class."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fuzz_case import Backward, Case, Forward, Net, Player, State, Zero

import ddp_from_scratch as ddp

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
    player, reducer = _with_ours(world, case, model, group)
    played = _play(player)
    if played.error is not None and together:
        reducer.remove()
        played.recovered = _trains_on(world, case, model)
    dist.barrier()
    if group is not None:
        dist.destroy_process_group(group)
    return played, _play(_with_torchs(world, case)) if as_torch else None


def _with_ours(
    world: Any, case: Case, model: Net, group: dist.ProcessGroup | None
) -> tuple[Player, ddp.Reducer]:
    options: dict[str, Any] = {
        "bucket_cap_mb": case.bucket_cap_mb,
        "gradient_as_bucket_view": case.gradient_as_bucket_view,
        "find_unused_parameters": case.find_unused_parameters,
        "static_graph": case.static_graph,
    }
    if case.wrapped:
        wrapper = ddp.DistributedDataParallel(model, process_group=group, **options)
        return Player(case, world.rank, model, wrapper, wrapper.no_sync), wrapper.reducer
    ddp.broadcast_parameters(model, process_group=group)
    reducer = ddp.Reducer(model, group, overlap=case.overlap, **options)
    return Player(case, world.rank, model, no_sync=reducer.no_sync), reducer


def _with_torchs(world: Any, case: Case) -> Player:
    model = Net(case, world.rank)
    wrapper = torch.nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=1e-5,
        gradient_as_bucket_view=case.gradient_as_bucket_view,
        find_unused_parameters=case.find_unused_parameters,
        static_graph=case.static_graph,
    )
    wrapper.broadcast_buffers = wrapper.forward_sync_buffers = case.wrapped
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
