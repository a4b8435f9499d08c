"""Fixtures of all tests."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import tiers
from tests.support.ranks import Crew
from tests.support.tiers import slow

# The console scripts of this Python (mpirun, torchrun) before any other's.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
torch.set_num_threads(1)


def pytest_runtest_setup() -> None:
    """Removes what killed mpiruns have left: the next one of the same number would not start."""
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        if not Path("/proc", folder.suffix[1:]).exists():
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def crews() -> Iterator[dict[tuple[str, int], Crew]]:
    """The crews that serve all tests."""
    found: dict[tuple[str, int], Crew] = {}
    yield found
    for crew in found.values():
        crew.end()


@pytest.fixture
def ranks(crews: dict[tuple[str, int], Crew]) -> Iterator[Callable[..., Crew]]:
    """`ranks(backend, world_size)(function, *arguments)` calls it on every rank.

    `ranks(backend, world_size, fresh=True)` starts ranks of the test's own, for what changes their
    process for good: another library, or an error that ends a group.
    """
    own: list[Crew] = []

    def crew(backend: str, world_size: int, fresh: bool = False) -> Crew:
        if fresh:
            own.append(Crew(backend, world_size, fresh=True))
            return own[-1]
        found = crews.get((backend, world_size))
        if found is None or found.ended:
            found = crews[backend, world_size] = Crew(backend, world_size)
        return found

    yield crew
    for made in own:
        made.end()


# The first tier has both backends and both sizes.
@pytest.fixture(params=["gloo-3", "mpi-2", slow("gloo-2"), slow("mpi-3")])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


@pytest.fixture(params=["gloo", "mpi"])
def pair(ranks, request):
    return ranks(request.param, 2)


@pytest.fixture(params=["gloo", "mpi"])
def trio(ranks, request):
    return ranks(request.param, 3)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one, in this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.sort(items)
