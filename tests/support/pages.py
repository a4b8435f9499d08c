"""The project's documents, and what can be read off them: excerpts, links, headings, options."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import ROOT
from tutorial.chapters import CHAPTERS

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "AGENTS.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TUTORIAL_PAGES = [ROOT / "tutorial" / "README.md", *(c / "README.md" for c in CHAPTERS)]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Excerpt:
    """A fenced block of a page, with what it prints where a block of `text` follows it."""

    page: Path
    number: int  # of the page's blocks in this language, from 1
    code: str
    prints: str = ""

    def __str__(self) -> str:
        return f"{name_of(self.page)}-{self.number}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def excerpts(language: str) -> list[Excerpt]:
    """The pages' blocks in a language; "" for those that name none, mostly commands."""
    found = []
    for page in PAGES:
        blocks = [block for tag, *block in _FENCE.findall(page.read_text()) if tag == language]
        found += [Excerpt(page, number, *block) for number, block in enumerate(blocks, 1)]
    return found


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """A page's headings as GitHub names them. In a module, what it defines, and its own name."""
    if page.suffix == ".py":
        defined = re.findall(r"^(?:def|class) (\w+)", page.read_text(), re.MULTILINE)
        return {page.stem, *defined}
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def links(page: Path) -> list[tuple[str, str]]:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    inside = [target for target in targets if "://" not in target]
    return [(path, anchor) for path, _, anchor in (target.partition("#") for target in inside)]
