"""Synchronous data-parallel training for PyTorch, built from scratch on torch.distributed.

    import torch
    import ddp_from_scratch as ddp

    with ddp.process_group("gloo") as world:
        model = Net().to(world.device)
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model)
        ...                                  # backward() now leaves averages in .grad

To follow one gradient, begin in `core/reducer.py`. Names here are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_from_scratch.common import log as _log  # noqa: F401  # before a program configures logging

if TYPE_CHECKING:
    from ddp_from_scratch.common.errors import (
        CommunicationError,
        PeerError,
        UsageError,
        WrongResultError,
    )
    from ddp_from_scratch.common.group import wait
    from ddp_from_scratch.common.state import broadcast_state
    from ddp_from_scratch.launch.claim import environment_without_rank
    from ddp_from_scratch.launch.environment import launcher
    from ddp_from_scratch.launch.rank_process import is_communication_error
    from ddp_from_scratch.launch.start import start_mpirun, start_ranks
    from ddp_from_scratch.optim.flat_optimizer import SGD, Adam, AdamW
    from ddp_from_scratch.optim.muon import Muon
    from ddp_from_scratch.options import comm_hooks, power_sgd
    from ddp_from_scratch.reducer import Reducer
    from ddp_from_scratch.sync.broadcast import broadcast_buffers, broadcast_parameters
    from ddp_from_scratch.sync.check_sync import check_sync
    from ddp_from_scratch.sync.optimizer_state import broadcast_optimizer_state
    from ddp_from_scratch.sync.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from ddp_from_scratch.torch_ddp.join import JoinableReducer, join
    from ddp_from_scratch.torch_ddp.wrapper import DistributedDataParallel
    from ddp_from_scratch.virtual_ranks.check_ranks import check_ranks
    from ddp_from_scratch.watch.stragglers import StragglerReport
    from ddp_from_scratch.watch.timeline import timeline
    from ddp_from_scratch.world.elastic import elastic
    from ddp_from_scratch.world.stop_signal import StopSignal
    from ddp_from_scratch.world.world import World, process_group

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CommunicationError",
    "DistributedDataParallel",
    "JoinableReducer",
    "Muon",
    "PeerError",
    "Reducer",
    "StopSignal",
    "StragglerReport",
    "SyncBatchNorm",
    "UsageError",
    "World",
    "WrongResultError",
    "broadcast_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_state",
    "check_ranks",
    "check_sync",
    "comm_hooks",
    "convert_sync_batchnorm",
    "elastic",
    "environment_without_rank",
    "is_communication_error",
    "join",
    "launcher",
    "power_sgd",
    "process_group",
    "start_mpirun",
    "start_ranks",
    "timeline",
    "wait",
]

# Imported when first asked for (PEP 562): what starts ranks, or prints --help, needs no torch.
_MODULES = {
    "SGD": "optim.flat_optimizer",
    "Adam": "optim.flat_optimizer",
    "AdamW": "optim.flat_optimizer",
    "CommunicationError": "common.errors",
    "DistributedDataParallel": "torch_ddp.wrapper",
    "JoinableReducer": "torch_ddp.join",
    "Muon": "optim.muon",
    "PeerError": "common.errors",
    "Reducer": "reducer",
    "StopSignal": "world.stop_signal",
    "StragglerReport": "watch.stragglers",
    "SyncBatchNorm": "sync.sync_batch_norm",
    "UsageError": "common.errors",
    "World": "world.world",
    "WrongResultError": "common.errors",
    "broadcast_buffers": "sync.broadcast",
    "broadcast_optimizer_state": "sync.optimizer_state",
    "broadcast_parameters": "sync.broadcast",
    "broadcast_state": "common.state",
    "check_ranks": "virtual_ranks.check_ranks",
    "check_sync": "sync.check_sync",
    "comm_hooks": "options.comm_hooks",
    "convert_sync_batchnorm": "sync.sync_batch_norm",
    "elastic": "world.elastic",
    "environment_without_rank": "launch.claim",
    "is_communication_error": "launch.rank_process",
    "join": "torch_ddp.join",
    "launcher": "launch.environment",
    "power_sgd": "options.power_sgd",
    "process_group": "world.world",
    "start_mpirun": "launch.start",
    "start_ranks": "launch.start",
    "timeline": "watch.timeline",
    "wait": "common.group",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = _MODULES[name]
    module = import_module(f"{__name__}.{path}")
    value = module if name in ("comm_hooks", "power_sgd") else getattr(module, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
