"""Two tiers of tests: `make test` runs the first, `make test-all` both.

The second, marked `slow`, takes long, and repeats or combines what tests of the first show, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


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
    """Marks cases as slow without which all pairs of values remain; slow ones come last."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = set(covering(list(map(choices_of, cases))))
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def covering(cases: Sequence[Sequence[object]]) -> Iterator[int]:
    """The numbers of cases that together have every pair of choices which any case has."""
    missing = [frozenset(combinations(case, min(2, len(case)))) for case in cases]
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
