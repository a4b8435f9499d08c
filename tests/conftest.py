"""Fixtures of all tests."""

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support import tiers
from tests.support.ranks import Crew
from tests.support.tiers import slow

# The console scripts of this Python (mpirun, torchrun) before any other's.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
torch.set_num_threads(1)
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
SET_BY_THE_USER = set(os.environ)
SECONDS_A_TEST = 0.2, 0.9  # on average, in the first tier and in the second


def pytest_runtest_setup() -> None:
    """Removes what killed mpiruns have left: the next one of the same number would not start."""
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        if not Path("/proc", folder.suffix[1:]).exists():
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Crew]]:
    """`ranks(backend, world_size)(function, *arguments)` calls it on every rank.

    With `fresh=True` ranks end when the next are asked for: a test changes their process for good.
    """
    crews: dict[tuple[str, int], Crew] = {}
    own: list[Crew] = []

    def crew(backend: str, world_size: int, fresh: bool = False) -> Crew:
        while own:
            own.pop().end()
        if fresh:
            own.append(Crew(backend, world_size, fresh=True))
            return own[-1]
        found = crews.get((backend, world_size))
        if found is None or found.ended:
            found = crews[backend, world_size] = Crew(backend, world_size)
        return found

    yield crew
    for found in [*crews.values(), *own]:
        found.end()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Takes back what a test, or a process group that it opened in this process, has set."""
    with patch.dict(os.environ):
        for name in INTERFACES - SET_BY_THE_USER:
            os.environ.pop(name, None)
        yield


@pytest.fixture(autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds unit tests to starting none."""
    with tiers.no_processes() if tiers.is_marked(request.node, "unit") else nullcontext():
        yield


# The first tier has both backends and both sizes.
@pytest.fixture(params=["gloo-3", "mpi-2", slow("gloo-2"), slow("mpi-3")])
def crew(ranks, request):
    backend, world_size = request.param.split("-")
    return ranks(backend, int(world_size))


@pytest.fixture(params=["gloo", "mpi"])
def pair(ranks, request):
    return ranks(request.param, 2)


@pytest.fixture(params=["gloo", slow("mpi")])
def gloo_pair(ranks, request):
    return ranks(request.param, 2)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crew-order",
        default="as written",
        help="random:SEED shuffles the tests, which share their ranks' processes",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = config.getoption("--crew-order")
    if order.startswith("random:"):
        random.Random(order.removeprefix("random:")).shuffle(items)
    elif order != "as written":
        raise pytest.UsageError(f"--crew-order must be random:SEED, got {order!r}")
    tiers.sort(items)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str:
    more = config.pluginmanager.get_plugin("terminalreporter").stats.get("deselected", [])
    units = sum(tiers.is_marked(item, "unit") for item in items)
    seconds = sum(SECONDS_A_TEST[tiers.is_marked(item, "slow")] for item in items)
    first = f", first {units:,} without ranks" if 0 < units < len(items) else ""
    rest = f"; make test-all has {len(more):,} more" if more else ""
    minutes = max(1, round(seconds / 60))
    return f"{len(items):,} tests{first}, about {minutes} min on 2 idle cores{rest}"
