"""The text of what is raised, and the one line in which something is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from ddp_from_scratch import UsageError


def text_of(kind: Any, function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call says with the error that it raises, of this kind."""
    with pytest.raises(kind) as error:
        function(*arguments, **named)
    return str(error.value)


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    text = text_of(UsageError, function, *arguments, **named)
    assert "\n" not in text
    return text
