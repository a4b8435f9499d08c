"""One value of another type in a checkpoint that is otherwise whole, and sealed, is refused."""

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.contents import check_contents, check_fit
from ddp_from_scratch.training.settings import Settings
from tests.training.test_checkpoint import state

MODEL = nn.Linear(4, 3)


def whole() -> checkpoint.State:
    """What a run writes, with all that it may hold."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    settings = Settings(compress="powersgd", checkpoint_dir=Path("x"), precision="fp16")
    return state(1) | {"optimizer": optimizer.state_dict(), "settings": settings.as_saved()}


def places(content: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values inside."""
    if not isinstance(content, dict | list | tuple):
        return [way] if way else []
    items = content.items() if isinstance(content, dict) else enumerate(content[:3])
    return [one for key, value in items for one in [(*way, key), *places(value, (*way, key))]]


def with_value(content: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    key, *rest = way
    if isinstance(content, tuple):
        return tuple(with_value(list(content), way, value))
    content = copy.copy(content)
    content[key] = with_value(content[key], tuple(rest), value)
    return content


def kind_of(value: Any) -> str:
    return "table" if isinstance(value, dict) else type(value).__name__


VALUES = ("x", True, 1j, b"x", [1], {"x": 1}, torch.ones(2), torch.ones((), dtype=torch.int64))


def test_no_value_of_another_type_is_taken() -> None:
    loads = []
    good = whole()
    check_contents(good)
    check_fit(good, MODEL)
    for way in places(good):
        if way[:2] == ("optimizer", "param_groups"):
            continue  # never read: a run has its own
        before = good
        for key in way:
            before = before[key]
        for value in VALUES:
            # An optional value may also be given.
            if kind_of(value) == kind_of(before) or (before is None and value is VALUES[0]):
                continue
            bad = with_value(good, way, value)
            with suppress(UsageError):
                check_contents(bad)
                check_fit(bad, MODEL)
                loads.append(f"{way}: {before!r:.20} -> {value!r:.20}")
    assert loads == []


def test_the_line_names_the_value(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, with_value(whole(), ("settings", "seed"), torch.ones(2)))
    with pytest.raises(
        UsageError, match=r"seed of settings must be int, got one of \(2,\) and torch"
    ):
        checkpoint.load(path, torch.device("cpu"))


def test_an_older_or_newer_version_s_settings_load() -> None:
    good = whole()
    settings = {name: v for name, v in good["settings"].items() if name != "stragglers"}
    check_contents(good | {"settings": settings | {"later": [1, 2]}})
