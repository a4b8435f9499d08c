"""Fixtures of the mpi backend's tests."""

import pytest

from tests.support.tiers import slow


@pytest.fixture(params=[2, 3, slow(4)])
def crew(ranks, request):
    return ranks("mpi", request.param)
