"""Builds the simulated GPU before any ranks start, which wait for it."""

import pytest

from tests.support.simgpu import build


@pytest.fixture(scope="session", autouse=True)
def _built():
    if not build.missing():
        build.guard()
