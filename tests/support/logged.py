"""What the package logs, while its own handler writes it, too."""

import contextlib
import logging


@contextlib.contextmanager
def logged():
    """A list of levels and texts, to which each message in the block is added."""
    found, handler = [], logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("ddp_from_scratch")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
