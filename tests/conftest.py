"""Fixtures of all tests."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Crew

# The console scripts of this Python (mpirun, torchrun) before any other's.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[str, int], Crew]]:
    """`ranks(backend, world_size)(function, *arguments)` calls it on every rank."""
    crews: dict[tuple[str, int], Crew] = {}

    def crew(backend: str, world_size: int) -> Crew:
        found = crews.get((backend, world_size))
        if found is None or found.ended:
            found = crews[backend, world_size] = Crew(backend, world_size)
        return found

    yield crew
    for found in crews.values():
        found.end()
