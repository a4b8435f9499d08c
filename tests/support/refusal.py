"""The one line in which something is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from ddp_from_scratch import UsageError


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    with pytest.raises(UsageError) as error:
        function(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
