"""Fixtures of the mpi backend's tests."""

import pytest

SIZES = (2, 3, 4)


@pytest.fixture(params=SIZES)
def crew(ranks, request):
    return ranks("mpi", request.param)
