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


def _call(world: Any, module: str, name: str, *arguments: Any) -> None:
    # Pickle would find the test by the function's name.
    getattr(import_module(module), name).on_rank(world, *arguments)


def on(crew: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that takes a `world`; `crew` is a fixture, or such as "gloo-2"."""
    backend, _, size = crew.partition("-")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)[1:]
        fixture = "ranks" if size else crew

        def test(**given: Any) -> None:
            found = given[fixture](backend, int(size)) if size else given[fixture]
            test_of = function.__module__, function.__name__
            found(_call, *test_of, *(given[name] for name in names))

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(function, name))
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind) for name in (fixture, *names)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate
