"""The tutorial's chapters, and the samples and pictures on their pages."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

TUTORIAL = Path(__file__).parent
CHAPTERS = sorted(TUTORIAL.glob("[0-9][0-9]_*"))
NO_PROGRAMS = "exercise.py", "solution.py", "test_exercise.py"
# A command of a program, and what the page shows of its output, at once or further below.
SAMPLE = re.compile(
    r"^```\n(?P<command>(?:mpirun [^\n]*)?python -m tutorial\.[^\n]+)\n```$"
    r".*?^```text\n(?P<printed>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PICTURE = re.compile(r"^!\[.*\]\((.*\.png)\)$", re.MULTILINE)


@dataclass
class Sample:
    """A command of a page, its output, and the pictures that the page shows of the same run."""

    command: str
    printed: str
    pictures: list[str]


def chapter(number):
    """Returns the folder of the chapter with a number such as "7" or "07"; otherwise exits."""
    for folder in CHAPTERS:
        if number.zfill(2) == folder.name[:2]:
            return folder
    sys.exit(f"no chapter {number!r}: give a number from 01 to {CHAPTERS[-1].name[:2]}")


def programs(folder):
    """Returns the files of a chapter's programs, without its exercises."""
    return sorted(file for file in folder.glob("*.py") if file.name not in NO_PROGRAMS)


def page(folder):
    """Returns the file of a chapter's page."""
    return folder / "README.md"


def samples(text):
    """Returns the samples of a page, in order. A picture belongs to the last command above it."""
    found = [
        (match.start(), Sample(match["command"], match["printed"], []))
        for match in SAMPLE.finditer(text)
    ]
    for picture in PICTURE.finditer(text):
        above = [sample for begin, sample in found if begin < picture.start()]
        above[-1].pictures.append(picture[1])
    return [sample for _, sample in found]
