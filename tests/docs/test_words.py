"""The words of the field: phrases that a reader of PyTorch stumbles over do not come back."""

import re
from itertools import chain
from pathlib import Path

from tests.support.pages import PAGES, ROOT, TUTORIAL_PAGES

FOLDERS = ("ddp_from_scratch", "benchmarks", "examples", "tests", "tools", "tutorial")

# By phrase, what to write.
INSTEAD = {
    r"go(es|ing)? on": "continue",
    r"(comes?|came) again": "rejoin, arrive twice",
    r"(has|have) (come|gone)": "arrived, left, ended",
    r"alike": "the same on all ranks",
    r"anew": "again",
    r"is said": "is printed, is reported",
    r"be had": "is not available, cannot be combined",
    r"what is kept": "output",
    r"hand(s|ed|ing)? on": "broadcast, pass",
}


def test_phrases_that_have_a_better_word():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: {better}"
        for path in [*PAGES, *TUTORIAL_PAGES, *chain(*((ROOT / f).rglob("*.py") for f in FOLDERS))]
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for phrase, better in INSTEAD.items()
        if (match := re.search(rf"\b{phrase}\b", line, re.IGNORECASE))
    ]
    assert not found, "\n".join(found)
