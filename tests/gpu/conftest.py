"""Ranks with a simulated GPU."""

import subprocess
import sys

import pytest

from tests.support.simgpu import build
from tests.support.tiers import slow


@pytest.fixture(scope="session")
def built():
    if build.missing():
        pytest.skip(build.missing())
    # Before ranks wait for it. Not in this process: setuptools would warn after distutils.
    subprocess.run([sys.executable, "-m", "tests.support.simgpu.build"], check=True)


@pytest.fixture(params=[slow("legacy"), "nccl2"])
def sim(built, ranks, request):
    """Two ranks, whose NCCL waits as that class of torch's does."""
    return ranks(request.param, 2)


@pytest.fixture
def nccl2(built, ranks):
    return ranks("nccl2", 2)
