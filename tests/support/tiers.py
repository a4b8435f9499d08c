"""The second tier of tests, which `make test-all` runs and `make test` does not."""

from typing import Any

import pytest


def slow(*values: object) -> Any:
    """A case of `pytest.mark.parametrize` in the second tier."""
    return pytest.param(*values, marks=pytest.mark.slow)
