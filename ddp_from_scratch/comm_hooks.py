"""Comm hooks, by the name under which programs know them; see `core/comm_hooks.py`."""

from ddp_from_scratch.core.comm_hooks import average
from ddp_from_scratch.options import power_sgd
from ddp_from_scratch.options.comm_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

__all__ = ["allreduce_hook", "average", "bf16_compress_hook", "fp16_compress_hook", "power_sgd"]
