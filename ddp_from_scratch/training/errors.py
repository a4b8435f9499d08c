"""Errors of other packages as one line each. Does not import torch."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddp_from_scratch import UsageError


def one_line(error: BaseException) -> str:
    """Returns the error's text on one line, without errno and file name."""
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split()) or type(error).__name__


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Turns a failed import of an optional package into one line that says what to install."""
    install = f'pip install "ddp_from_scratch[{name}]"'
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: {install}") from error
    except RuntimeError as error:  # torchvision built for another torch
        raise UsageError(
            f"{one_line(error)}: torch and torchvision must come as a pair from one index, then "
            f"{install}"
        ) from error
