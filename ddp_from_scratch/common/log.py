"""The package's logger, which is `logging.getLogger("ddp_from_scratch")`.

By default a message is a line on standard error, also after `logging.basicConfig`: the logger has a
handler and a level (INFO) of its own, and does not propagate, so that a root handler does not write
the line again. A handler or level that a program sets before the import stays.
"""

import logging
import sys
from contextlib import suppress


class StandardError(logging.Handler):
    """Writes each message, without a prefix, to what `sys.stderr` is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        # A closed stream or a full disk must not end a training step.
        with suppress(OSError, ValueError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


logger = logging.getLogger("ddp_from_scratch")
if not logger.handlers:
    logger.addHandler(StandardError())
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
