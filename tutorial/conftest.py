"""Fixtures for the exercises' tests: they test exercise.py, or with --solution solution.py."""

from importlib import import_module

import pytest

from tutorial.ranks import start


def pytest_addoption(parser):
    """Adds --solution."""
    text = "tutorial: test solution.py, not exercise.py"
    parser.addoption("--solution", action="store_true", help=text)


def pytest_configure(config):
    """Allows a `test_exercise.py` in every chapter, and shortens the output of failing tests."""
    config.option.importmode = "importlib"
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"


@pytest.fixture
def exercise(request):
    """The module under test, from the folder of the test."""
    folder = request.path.parent.name
    name = "solution" if request.config.getoption("--solution") else "exercise"
    return import_module(f"tutorial.{folder}.{name}")


@pytest.fixture
def on_ranks(exercise):
    """`on_ranks(n, function, *arguments)`: `function(exercise, *arguments)` on each of n ranks."""

    def run(nproc, function, *arguments):
        try:
            return start(call, nproc, exercise.__name__, function, *arguments)
        except SystemExit as end:
            ended = end
        if ended.code == 130:
            raise KeyboardInterrupt
        # The line names rank, error and place; a traceback through `start` would not help.
        return pytest.fail(str(ended), pytrace=False)

    return run


def call(name, function, *arguments):
    """On a rank: calls the function with the module under test, which cannot be sent to a rank."""
    return function(import_module(name), *arguments)
