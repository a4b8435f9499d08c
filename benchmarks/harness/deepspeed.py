"""DeepSpeed's all-reduce in shared memory (`ShareMemCommBuilder`), where it is installed."""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "DeepSpeed"
# The vector instructions that its sums need: 1 is AVX2, 2 is AVX-512. It sums no other dtypes.
_LEVEL = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}
_BYTES_OF_RANK = 70 * 2**20  # more than a rank allocates in /dev/shm


def missing(ranks: int) -> str | None:
    """Compiles DeepSpeed's part if necessary; returns the reason if it is unavailable."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if shutil.disk_usage("/dev/shm").free < ranks * _BYTES_OF_RANK:
        return "/dev/shm is too small for it"
    try:
        _load()
    except Exception as error:  # noqa: BLE001  # no compiler, or a torch that it does not know
        return f"it cannot be built: {error}"
    return None


def _load() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it looks for GPUs and logs that
    builder = importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder()
    return builder.load(verbose=False)


class SharedMemory:
    """The memory of the default group's ranks, which share a machine. Collective.

    Raises:
        RuntimeError: its all-reduce gives a wrong sum.
    """

    def __init__(self) -> None:
        size, rank, module = dist.get_world_size(), dist.get_rank(), _load()
        self._level = module.vector_kernel_level()
        # A name that no other job uses, nor a killed one used.
        job = torch.tensor(os.getpid())
        dist.broadcast(job, 0)
        names = {
            "LOCAL_SIZE": str(size),
            "MASTER_ADDR": "allreduce",
            "MASTER_PORT": str(job.item()),
        }
        before = dict(os.environ)
        os.environ.update(names)
        module.initialize(size, rank)
        for name in names:
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})
        dist.barrier()
        # All ranks have opened the memory. Without its name it is freed when they end.
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_allreduce_{job.item()}_{rank}"
        Path("/dev/shm", name).unlink()
        ones = torch.ones(1024)
        if self.has(ones.dtype) and not torch.equal(
            self.all_reduce(ones), torch.full((1024,), size)
        ):
            raise RuntimeError(f"DeepSpeed's all-reduce of ones among {size} ranks gave {ones[0]}")

    def has(self, dtype: torch.dtype) -> bool:
        """True if it sums this dtype on this processor."""
        return dtype in _LEVEL and self._level >= _LEVEL[dtype]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = torch.ops.deepspeed.inference_all_reduce_(tensor)
        return summed
