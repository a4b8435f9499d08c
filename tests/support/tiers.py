"""Two tiers of tests: `make test` runs the first, `make test-all` both.

The second, marked `slow`, takes long, and repeats or combines what tests of the first show, too.
The first begins with the unit tests, which need neither ranks nor another process. They are marked
here, and a unit test that starts a process fails.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import pytest

# The markers of tests that are no unit tests.
NO_UNIT = ("gpu", "program", "root", "slow")


def slow(*values: object) -> Any:
    """A case of `pytest.mark.parametrize` in the second tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def spread(first: Iterable[Any], second: Iterable[Any], third: Sequence[Any]) -> list[Any]:
    """Every pair of the first two, a third of them in the first tier, with the third in turn."""
    cases: list[Any] = []
    for (i, one), (j, two) in product(enumerate(first), list(enumerate(second))):
        turn, rest = divmod(i + j, 3)
        case = one, two, third[turn % len(third)]
        cases.append(slow(*case) if rest else case)
    return cases


def sort(items: list[pytest.Item]) -> None:
    """Marks cases as slow that are further combinations; slow ones come last.

    In the first tier a unit test keeps all pairs of values, and a test with ranks all values.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        together = 2 if is_unit(cases[0]) else 1
        chosen = set(covering(list(map(choices_of, cases)), together))
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("slow")
    for item in items:
        if is_unit(item):
            item.add_marker("unit")
    items.sort(key=lambda item: (is_marked(item, "slow"), not is_marked(item, "unit")))


def is_unit(item: pytest.Item) -> bool:
    """True if a test needs neither ranks nor another process, and is in the first tier."""
    fixtures = item.fixturenames  # type: ignore[attr-defined]
    return "ranks" not in fixtures and not any(map(item.get_closest_marker, NO_UNIT))


def is_marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


@contextmanager
def no_processes() -> Iterator[None]:
    """Fails a test that starts a process."""

    def refuse(*arguments: object, **options: object) -> None:
        pytest.fail("a unit test starts a process: mark it with @pytest.mark.program")

    starts = "os.fork", "subprocess.Popen.__init__", "multiprocessing.process.BaseProcess.start"
    with ExitStack() as stack:
        for start in starts:
            stack.enter_context(patch(start, refuse))
        yield


def covering(cases: Sequence[Sequence[object]], together: int) -> Iterator[int]:
    """The numbers of cases that have every choice, or every two `together`, that any case has."""
    missing = [frozenset(combinations(case, min(together, len(case)))) for case in cases]
    while any(missing):
        best = max(range(len(cases)), key=lambda number: len(missing[number]))
        yield best
        seen = missing[best]
        missing = [pairs - seen for pairs in missing]


def choices_of(case: pytest.Item) -> list[object]:
    """A choice for each `parametrize`, whose names vary together, and each fixture."""
    values = dict(case.callspec.params)  # type: ignore[attr-defined]
    choices: list[object] = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # By identity: not every value can be hashed, and a test's cases share the objects.
        choices.append(tuple((name.strip(), id(values.pop(name.strip()))) for name in names))
    return choices + [(name, id(value)) for name, value in sorted(values.items())]
