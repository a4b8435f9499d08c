"""The tutorial's chapters, and what can be read off their pages."""

import re

from tests.support.ranks import ROOT

TUTORIAL = ROOT / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("[0-9][0-9]_*"))
PAGES = [TUTORIAL / "README.md", *(chapter / "README.md" for chapter in CHAPTERS)]


def samples(page):
    """Each command of a program with the output that the page shows for it."""
    pattern = r"^```\n(python -m tutorial\.[^\n]+)\n```$.*?^```text\n(.*?)^```$"
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page):
    """All lines of a page's blocks of commands."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line for language, block in blocks if not language for line in block.splitlines()]
