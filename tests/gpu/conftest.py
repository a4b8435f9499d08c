"""Builds the simulated GPU before any ranks start, which wait for it."""

import subprocess
import sys

import pytest

from tests.support.simgpu import build


@pytest.fixture(scope="session", autouse=True)
def _built():
    if not build.missing():
        # Not in this process: torch's tool imports setuptools, which warns after distutils.
        subprocess.run([sys.executable, "-m", "tests.support.simgpu.build"], check=True)
