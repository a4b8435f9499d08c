"""Private names of torch that the library does without where they are missing: they are there."""

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


@pytest.mark.parametrize(
    ("since", "place", "name"),
    [
        ("2.14", c10d, "FlightRecorderHook"),
        ("2.15", dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS"),
        ("2.15", getattr(c10d, "FlightRecorderHook", None), "attach"),
    ],
)
def test_this_torch_has_it(since, place, name):
    assert torch.__version__ < since or hasattr(place, name)
