"""What a test may not change in the process of a rank, which serves other tests after it.

The number of threads or oneDNN's switch alone would change the bits of a later test's convolution.
"""

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_from_scratch.options import launch_order

STALL_WATCH, CALL_WATCH = "ddp stall watch", "ddp call watch"
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM]
# Set by launchers and libraries in the course of their work, and read by nobody again.
_IGNORED = ("PYTEST_", "KINETO_", "TORCHINDUCTOR_", "TRITON_")


def _state() -> dict[str, Any]:
    return {
        # What decides the bits of a computation.
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.backends.nnpack.enabled()": torch._C._get_nnpack_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "converted in place": not torch.__future__.get_overwrite_module_params_on_conversion(),
        "dist.get_debug_level()": dist.get_debug_level(),
        "os.getcwd()": os.getcwd(),
        **{f"${k}": v for k, v in os.environ.items() if not k.startswith(_IGNORED)},
        **{f"handler of {s.name}": signal.getsignal(s) for s in _SIGNALS},
        "open process groups": sorted(dist.distributed_c10d._world.pg_names.values()),
        "Python threads": sorted(
            thread.name
            for thread in threading.enumerate()
            # Those of groups are compared above; the others look whether they are still needed.
            if "-group-" not in thread.name
            and thread.name not in ("tqdm_monitor", STALL_WATCH, CALL_WATCH)
            # A thread of torch's that has called back, and is not Python's to end.
            and not isinstance(thread, threading._DummyThread)
        ),
    }


@contextmanager
def unchanged() -> Iterator[None]:
    """Puts a rank's process in order after the block; raises AssertionError where it cannot."""
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    opened = dict(dist.distributed_c10d._world.pg_names)
    before = _state()
    yield
    # An error that torch keeps in C++ keeps the Reducer that raised it.
    for reducer in launch_order.active_reducers():
        reducer.remove()
    for group in tuple(dist.distributed_c10d._world.pg_names):  # on all ranks in the same order
        if group not in opened:
            dist.destroy_process_group(group)
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])
    after = _state()
    if after != before:
        gc.collect()  # what lies in cycles of references may have threads
        for thread in threading.enumerate():
            started = thread.name not in before["Python threads"]
            if started and not isinstance(thread, threading._DummyThread):
                thread.join(1.0)
        after = _state()
    if after != before:
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        texts = [f"{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in names]
        raise AssertionError(f"this test has changed the process of its rank: {'; '.join(texts)}")
