"""Makes the pages of the site from the repository's Markdown files and its code; called by mkdocs.

A page lies in the site where its file lies in the repository, so that links between files hold.
Code that a page links to becomes a page, too: a room of the package its reference from the
docstrings, any other program its text.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddp_from_scratch"
FOLDERS = ("docs", "tutorial", "examples", "benchmarks")
PICTURES = (".png", ".svg")
# Written by `make docs` before the pages are built.
TIMELINE = ROOT / "build" / "timeline"
_TIMELINE_PAGE = """# A timeline

`python run.py --epochs 1 --timeline timeline` has written it ([alone](timeline.html)).
Zoom with the wheel, and move over a bar; [See a step](../docs/how-to/timeline.md) says how to read
it.

<iframe src="timeline.html" title="a timeline"
    style="width: 100%; height: 34rem; border: 0"></iframe>
"""
_LINK = re.compile(
    r"(?P<before>!?\[(?P<text>[^\]]*)\]\()(?!\w+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the pages in the order in which they are read; their titles are their headings."""
    tutorial = sorted((ROOT / "tutorial").glob("*/README.md"))
    config.nav = [
        {"Start": ["README.md", "docs/how-it-works.md"]},
        {"Learn": _names([*(ROOT / "tutorial").glob("README.md"), *tutorial])},
        {"How to": _names(sorted((ROOT / "docs" / "how-to").glob("*.md")))},
        {"Examples": _names(sorted((ROOT / "examples").glob("*.md")))},
        {"Benchmarks": ["benchmarks/README.md", "timeline/README.md"]},
        {
            "Reference": [
                "docs/reference.md",
                "docs/private-names.md",
                {"Code": [f"{room}/README.md" for room in _names(_rooms())]},
            ]
        },
        {"Change it": ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md"]},
    ]
    config.nav = [tab for tab in config.nav if any(tab.values())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of `docs_dir` by those of the repository, and the pages made of code."""
    found = Files([file for file in files if not (ROOT / "docs" / file.src_uri).exists()])
    for path in _pages():
        source = str(path.relative_to(ROOT))
        found.append(File(source, str(ROOT), config.site_dir, use_directory_urls=False))
    for room in _rooms():
        name = f"{room.relative_to(ROOT)}/README.md"
        found.append(File.generated(config, name, content=_reference(room)))
    for program in _programs():
        name = f"{program.relative_to(ROOT)}.md"
        text = f"# {program.name}\n\n```python\n{program.read_text()}```\n"
        found.append(File.generated(config, name, content=text))
    found.append(File.generated(config, "timeline/README.md", content=_TIMELINE_PAGE))
    found.append(File.generated(config, "timeline/timeline.html", content=_timeline()))
    return found


def _timeline() -> str:
    try:
        return (TIMELINE / "timeline.html").read_text()
    except FileNotFoundError as error:
        raise PluginError(f"{error.filename} is missing: make docs writes it") from None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to code and folders at the pages that stand for them."""
    here = (ROOT / page.file.src_uri).parent
    parts = _FENCE.split(markdown)
    # Every second part is a fenced block.
    parts[::2] = [_LINK.sub(lambda link: _resolved(here, link, files), part) for part in parts[::2]]
    return "".join(parts)


def _resolved(here: Path, link: re.Match[str], files: Files) -> str:
    path, anchor = (here / link["path"]).resolve(), link["anchor"] or ""
    page = path
    if path.is_dir():
        page = path / "README.md"
    elif path.suffix == ".py" and PACKAGE in path.parents:
        module = path.relative_to(ROOT).with_suffix("").parts
        page, anchor = ROOT / Path(*module[:2]) / "README.md", f"#{'.'.join(module)}"
    elif path.suffix == ".py":
        page = path.with_name(f"{path.name}.md")
    name = str(page.relative_to(ROOT))
    if path.exists() and files.get_file_from_path(name) is None:
        return link["text"]  # it is there, and no part of the site
    up = len(here.relative_to(ROOT).parts) * "../"
    return f"{link['before']}{up}{name}{anchor})"


def _names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def _pages() -> list[Path]:
    """Markdown files and the pictures beside them."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = [path for path in inside if path.suffix in (".md", *PICTURES)]
    return [*sorted(ROOT.glob("*.md")), *sorted(kept)]


def _rooms() -> list[Path]:
    """The package's folders of code, and the modules beside them, each as a folder of one."""
    alone = [path.with_suffix("") for path in PACKAGE.glob("*.py") if path.stem[:2] != "__"]
    return sorted([*alone, *(init.parent for init in PACKAGE.glob("*/__init__.py"))])


def _programs() -> list[Path]:
    """Programs that readers run or open."""
    inside = (path for folder in ("tutorial", "examples") for path in (ROOT / folder).rglob("*.py"))
    return [ROOT / "run.py", *sorted(inside)]


def _reference(room: Path) -> str:
    """The page of a room: its docstring, and all its modules."""
    found = room.glob("*.py") if room.is_dir() else [room.with_suffix(".py")]
    modules = sorted(path for path in found if not path.stem.startswith("__"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
    return "\n\n".join([f"# {room.name}", *(f"::: {name}" for name in names)]) + "\n"
