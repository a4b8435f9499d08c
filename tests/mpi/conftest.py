"""Crews of ranks on the mpi backend."""

import pytest


@pytest.fixture(params=(2, 3, 4))
def crew(ranks, request):
    return ranks("mpi", request.param)
