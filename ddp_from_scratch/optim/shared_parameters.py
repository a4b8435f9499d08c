"""Parameters of which a machine's ranks have one copy: any other optimizer would step them twice.

`shard="node"` moves parameters into memory that ranks share, and they stay there when the optimizer
is gone. Each rank's step of another optimizer would change the one copy once more.
"""

import weakref
from collections.abc import Iterable
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

# By id, where the memory of a parameter begins that ranks share.
_shared: dict[int, int] = {}


def note_shared(parameters: Iterable[torch.Tensor]) -> None:
    """Has other optimizers than those with `shard="node"` refuse to step these parameters."""
    _watch_steps()
    for parameter in parameters:
        if id(parameter) not in _shared:
            weakref.finalize(parameter, _shared.pop, id(parameter), None)
        _shared[id(parameter)] = parameter.untyped_storage().data_ptr()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    # No Python call for each parameter: every step of every optimizer comes here.
    groups = map(itemgetter("params"), optimizer.param_groups)
    if _shared.keys().isdisjoint(map(id, chain.from_iterable(groups))):
        return
    if getattr(optimizer, "shard", None) == "node":
        return
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        place = _shared.get(id(parameter))
        if place is not None and parameter.untyped_storage().data_ptr() == place:
            raise RuntimeError(
                f"{type(optimizer).__name__} would step a parameter of shape "
                f"{tuple(parameter.shape)} once for each rank of this machine, because an "
                f'optimizer with shard="node" has put it into memory that they share: use '
                f'shard="node" here, too, or first give each rank its own copy, with p.data = '
                f"p.data.clone() for each parameter"
            )
