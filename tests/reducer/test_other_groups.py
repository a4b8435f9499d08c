"""A Reducer on the default group outlives it: the next group may have another size."""

import subprocess
import sys

import pytest

from tests.support.ranks import ROOT

# One rank, and a group that says that it has two: what counts is the division.
PROGRAM = """
import torch, torch.distributed as dist, ddp_from_scratch as ddp
from unittest.mock import patch
with ddp.process_group("gloo"):
    model = torch.nn.Linear(1, 1, bias=False)
    reducer = ddp.Reducer(model, shared_memory=False)
    model(torch.ones(1, 1)).sum().backward()
    print(model.weight.grad.item())
with ddp.process_group("gloo"), patch.object(dist, "get_world_size", lambda group=None: 2):
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    print(model.weight.grad.item())
"""


@pytest.mark.timeout(60)
def test_the_division_is_by_the_ranks_of_the_group_that_is_open():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.stdout.split() == ["1.0", "0.5"], done.stderr
