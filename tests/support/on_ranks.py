"""Tests whose whole function runs on every rank of a crew.

@on("pair")
def test_ranks_add_up(world):
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    assert total == 3
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any


class _Named:
    """A test's function, which is found by the test's name: pickle would find the test."""

    def __init__(self, test: Callable[..., None]) -> None:
        self.module, self.name = test.__module__, test.__name__

    def __call__(self, world: Any, *arguments: Any) -> None:
        getattr(import_module(self.module), self.name).on_rank(world, *arguments)


def on(crew: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that takes a `world`; `crew` is a fixture, or such as "gloo-2"."""
    backend, _, size = crew.partition("-")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)[1:]
        fixture = "ranks" if size else crew

        def test(**given: Any) -> None:
            found = given[fixture](backend, int(size)) if size else given[fixture]
            found(_Named(function), *(given[name] for name in names))

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(function, name))
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind) for name in (fixture, *names)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate
