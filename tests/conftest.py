"""Fixtures of all tests, and the tier that each belongs to.

`pytest` runs the first tier, `pytest -m ""` everything. In the second are the tests marked `slow`:
those that take long, and the cases of a test which differ from others of it only in a combination.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Crew
from tests.support.tiers import slow

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
    """Moves to the second tier what pairs of values do not need, and has it run last."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        for case in set(cases) - set(covering(cases)):
            case.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def covering(cases: list[pytest.Item]) -> Iterable[pytest.Item]:
    """Cases that have every pair of values among them."""
    missing = {case: pairs_of(case) for case in cases}
    while any(missing.values()):
        best = max(cases, key=lambda case: len(missing[case]))
        seen = missing[best]
        yield best
        missing = {case: pairs - seen for case, pairs in missing.items()}


def pairs_of(case: pytest.Item) -> frozenset[object]:
    choices = choices_of(case)
    return frozenset(combinations(choices, min(2, len(choices))))


def choices_of(case: pytest.Item) -> list[tuple[object, ...]]:
    """A choice for each fixture and each `parametrize`, whose names vary together."""
    values = dict(case.callspec.params)  # type: ignore[attr-defined]
    choices: list[tuple[object, ...]] = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # All cases share the objects, and not every object can be hashed.
        choices.append(tuple((name.strip(), id(values.pop(name.strip()))) for name in names))
    return choices + [(name, id(value)) for name, value in sorted(values.items())]
