"""Synchronous data-parallel SGD over torch.distributed, written to be read.

    import torch
    import ddp_from_scratch as ddp

    with ddp.process_group("gloo") as world:
        model = Net().to(world.device)
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model)
        ...                                  # backward() now leaves averages in .grad

The way of one gradient: `reducer.py` (hooks) → `bucket.py` (pack, launch, wait, unpack) →
`comm_hooks.py` (what is sent), with `layout.py` saying what lies where.
"""

from . import comm_hooks, power_sgd
from .broadcast import broadcast_buffers, broadcast_parameters
from .check_sync import check_sync
from .distributed_data_parallel import DistributedDataParallel
from .errors import UsageError
from .join import JoinableReducer, join
from .node_shared import NodeSharedSGD
from .process_group import World, process_group
from .reducer import Reducer
from .sgd import SGD
from .supervisor import start_ranks
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "SGD",
    "DistributedDataParallel",
    "JoinableReducer",
    "NodeSharedSGD",
    "Reducer",
    "SyncBatchNorm",
    "UsageError",
    "World",
    "broadcast_buffers",
    "broadcast_parameters",
    "check_sync",
    "comm_hooks",
    "convert_sync_batchnorm",
    "join",
    "power_sgd",
    "process_group",
    "start_ranks",
]
