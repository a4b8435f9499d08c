"""The package's messages go to standard error, or where a program sends them with `logging`."""

import logging
import subprocess
import sys

import pytest

from ddp_from_scratch.common.log import logger
from ddp_from_scratch.launch.rank_process import say
from tests.support.logged import logged

TEXTS = ["100 % of it", "a stall", "an error"]
ALL = "".join(f"{text}\n" for text in TEXTS)
ROOT = "logging.basicConfig(stream=sys.stderr, format='%(levelname)s %(message)s')"
CONFIG = "import logging.config; logging.config.dictConfig({})"
OURS = "logger = logging.getLogger('ddp_from_scratch')"
OWN = f"{OURS}; logger.handlers = [logging.StreamHandler(sys.stdout)]"

PROGRAM = """
import io, logging, sys
{before}
import ddp_from_scratch
{after}
from ddp_from_scratch.common import log
for level, text in enumerate({texts}, 2):
    log.logger.log(10 * level, text)
"""


def run(before="", after=""):
    """Standard error and output of a program, which needs no torch to log."""
    program = PROGRAM.format(before=before, after=after, texts=TEXTS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr, done.stdout


@pytest.mark.program
@pytest.mark.parametrize(
    ("before", "after", "written"),
    [
        ("", "", (ALL, "")),
        (ROOT, "", (ALL, "")),
        ("", ROOT, (ALL, "")),  # once
        ("", f"{ROOT}; logging.getLogger().setLevel(50)", (ALL, "")),
        ("", f"{OURS}; logger.setLevel(logging.ERROR)", ("an error\n", "")),
        (f"{OURS}; logger.setLevel(logging.ERROR)", "", ("an error\n", "")),
        ("", CONFIG.format("{'version': 1}"), ("", "")),
        ("", CONFIG.format("{'version': 1, 'disable_existing_loggers': False}"), (ALL, "")),
        ("", OWN, ("", ALL)),
        (OWN, "", ("", ALL)),
        (
            "",
            f"{OURS}; logger.handlers.clear(); logger.propagate = True; {ROOT}",
            ("INFO 100 % of it\nWARNING a stall\nERROR an error\n", ""),
        ),
        ("", "sys.stderr = sys.stdout", ("", ALL)),  # a stream that takes its place
        ("", "sys.stderr = io.StringIO(); sys.stderr.close()", ("", "")),  # and raises nothing
    ],
)
def test_where_messages_go(before, after, written):
    assert run(before, after) == written


def test_caplog_has_the_messages_of_a_logger_that_propagates(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    logger.warning("a stall")
    # pytest 9.2 attaches itself to a logger that does not propagate, and so has it twice.
    assert set(caplog.record_tuples) == {("ddp_from_scratch", logging.WARNING, "a stall")}


def test_what_a_launcher_says_is_logged(capsys):
    with logged() as found:
        say("machine 1 joined")
    assert found == [("INFO", "machine 1 joined")]
    assert capsys.readouterr().err == "machine 1 joined\n"
