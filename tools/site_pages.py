"""python tools/site_pages.py FOLDER: writes the site as a tree of plain Markdown files.

A page lies in FOLDER where its file lies in the repository, so that links between files hold. Code
that a page links to becomes a page with its text. `api_pages.py` writes the API reference. Any
generator can build the tree; `make docs` takes Sphinx (`tools/site/conf.py`), with `CONTENTS` as
its table of contents.
"""

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import api_pages
from api_pages import PACKAGE, ROOT

from ddp_from_scratch.bench import what_if
from ddp_from_scratch.bench.step_model import Layers

TITLE = "# ddp_from_scratch"  # the README's
PICTURES = (".png", ".svg")
FOLDERS = ("docs", "tutorial", "examples", "benchmarks")
CODE = ("ddp_from_scratch", "tutorial", "examples", "benchmarks", "tools")
# What a reader needs first stands first.
HOW_TO = (
    *(
        "start",
        "your-loop",
        "cores",
        "torch-ddp",
        "from-horovod",
        "checkpoints",
        "uneven-data",
        "models",
        "buckets",
    ),
    *(
        "optimizers",
        "comm-hooks",
        "find-faults",
        "timeline",
        "gpu",
        "mpi",
        "trainer",
        "shared-memory",
    ),
    *("slurm", "clusters", "elastic", "same-bits", "observers"),
)
CHAPTERS = [
    f"tutorial/{path.parent.name}/README.md"
    for path in sorted((ROOT / "tutorial").glob("*/README.md"))
]
ROOMS = sorted(init.parent for init in PACKAGE.glob("*/__init__.py"))
INSIDE = "ddp_from_scratch/inside.md"
# By caption, pages with the pages below them.
CONTENTS: dict[str, dict[str, list[str]]] = {
    "Start": {"README.md": [], "docs/README.md": [], "docs/how-it-works.md": []},
    "Learn": {"tutorial/README.md": CHAPTERS, "examples/README.md": []},
    "How to": {f"docs/how-to/{name}.md": [] for name in HOW_TO},
    "Reference": {
        "api/README.md": [f"api/{entry}.md" for entry in api_pages.ENTRIES],
        "docs/reference.md": [],
        "docs/glossary.md": [],
        "docs/private-names.md": [],
    },
    "Measured": {"benchmarks/README.md": [], "timeline/README.md": [], "what_if/README.md": []},
    "Change it": {
        **{name: [] for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md")},
        INSIDE: [f"ddp_from_scratch/{room.name}/README.md" for room in ROOMS],
    },
}
ASIDE = "---\nnosearch: true\n---\n\n"  # Sphinx leaves the page out of its search
_SAMPLE = "benchmarks/results/timeline-resnet18-gloo"
_TIMELINE = f"""# A timeline

A step of ResNet-18 on two ranks, as `--timeline` draws it, and as it prints it. [See a
step](../docs/how-to/timeline.md) explains how to read both, and how to write your own, with a page
to zoom in.

![the phases of a step of two ranks](../{_SAMPLE}.png)

```text
{(ROOT / f"{_SAMPLE}.txt").read_text()}```
"""
_WHAT_IF = """# What would a step cost?

Choose buckets, ranks and a wire, and guess before you see the answer
(<a href="what_if.html">open it alone</a>). `python -m benchmarks.what_if --record` measured the
layers, and `python -m ddp_from_scratch.bench --what-if step.html` writes a page for your model.
[Buckets](../docs/how-to/buckets.md#what-would-a-step-cost) explains what it computes.

<iframe src="what_if.html" title="what would a step cost?"></iframe>
"""
_LINK = re.compile(
    r"(?P<before>!?\[(?P<text>[^\]]*)\]\()(?!\w+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def write(folder: Path) -> None:
    """Writes all pages and the pictures that they show."""
    texts = pages()
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for picture in _files(FOLDERS, *PICTURES):
        (folder / picture).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / picture, folder / picture)


def pages() -> dict[str, str]:
    """Returns the text of each page, by its path in the tree."""
    texts = {name: (ROOT / name).read_text() for name in _files(FOLDERS, ".md")}
    texts |= {path.name: path.read_text() for path in sorted(ROOT.glob("*.md"))}
    texts |= api_pages.pages()
    texts["timeline/README.md"] = _TIMELINE
    texts["what_if/README.md"] = _WHAT_IF
    texts[INSIDE] = ASIDE + _inside()
    for room in ROOMS:
        texts[f"ddp_from_scratch/{room.name}/README.md"] = ASIDE + _room(room)
    for name in ["run.py", "noxfile.py", *_files(CODE, ".py")]:
        title = name if name.startswith("tutorial") else name.removeprefix("ddp_from_scratch/")
        code = (ROOT / name).read_text()
        texts[f"{name}.md"] = f"{ASIDE}# {title}\n\n```python\n{code}```\n"
    for name in CHAPTERS:  # the site has such links below each page
        texts[name] = re.sub(r"\n(Back|Next): (?s:.*)\Z", "", texts[name])
    readme = texts["README.md"]
    texts |= {"index.md": _landing(readme), "README.md": readme.replace(TITLE, "# Overview", 1)}
    return {name: _with_links(name, text, texts) for name, text in texts.items()}


def what_if_page() -> str:
    """Returns the what-if page, with the recorded models of the benchmark."""
    rows = json.loads((ROOT / "benchmarks/results/what_if-models.json").read_text())["samples"]
    return what_if.as_html([Layers(**row) for row in rows])


def _with_links(name: str, markdown: str, there: Iterable[str]) -> str:
    """Points links to code and folders at the pages that stand for them."""
    parts = _FENCE.split(markdown)
    # Every second part is a fenced block.
    parts[::2] = [_LINK.sub(lambda link: _resolved(name, link, there), part) for part in parts[::2]]
    return "".join(parts)


def _resolved(name: str, link: re.Match[str], there: Iterable[str]) -> str:
    path, anchor = (ROOT / name).parent / link["path"], link["anchor"] or ""
    page = str(path.resolve().relative_to(ROOT))
    if path.suffix in PICTURES:
        return link[0]
    if path.is_dir():
        page = f"{page}/README.md"
    elif path.suffix == ".py":
        # To the entry of a public name, else to the text of the file, which has no anchors.
        entry = api_pages.ENTRY_OF.get(anchor.removeprefix("#"))
        page, anchor = (f"api/{entry}.md", anchor.lower()) if entry else (f"{page}.md", "")
    if path.exists() and page not in there:
        return link["text"]  # it is there, and no part of the site
    return f"{link['before']}{'../' * name.count('/')}{page}{anchor})"


def _files(folders: Iterable[str], *endings: str) -> list[str]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.suffix in endings)


def _inside() -> str:
    """The page above the folders, for those who change the code."""
    rows = [f"- [{room.name}]({room.name}/README.md): {_first_line(room)}" for room in ROOMS]
    alone = sorted(path for path in PACKAGE.glob("*.py") if path.name[:2] != "__")
    rows += [f"- [{path.name}]({path.name}.md): {_first_line(path)}" for path in alone]
    text = "The folders of the package, for those who change it. [Layers](../docs/how-it-works.md"
    text += "#layers) shows which imports which. Programs need only [the API](../api/README.md)."
    return "\n".join(["# Inside the package\n", f"{text}\n", *rows, ""])


def _room(room: Path) -> str:
    rows = [f"- [{p.name}]({p.name}.md): {_first_line(p)}" for p in sorted(room.glob("[!_]*.py"))]
    return "\n".join([f"# {room.name}\n", f"{_first_line(room)}\n", *rows, ""])


def _first_line(code: Path) -> str:
    text = (code / "__init__.py" if code.is_dir() else code).read_text()
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def _landing(readme: str) -> str:
    """The first page: parts of the README, side by side where there is room."""
    head = readme.partition("\n\n```python\n")[0]
    program, commands, *_ = _FENCE.findall(readme)
    table = re.search(r"^\|.*?(?=\n\n)", readme, re.DOTALL | re.MULTILINE)
    picture = re.search(r"^!\[.*\)$", readme, re.MULTILINE)
    status = re.search(r"(?<=^- )\*\*Status.\*\*.*?(?=\n\n)", readme, re.DOTALL | re.MULTILINE)
    assert table is not None
    assert status is not None
    assert picture is not None
    about = "On CPUs, 2 ranks on 2 cores, gloo: a step's time divided by torch DDP's at its fastest"
    return f"""---
hide-toc: true
---

{head}

<div class="landing"><div>

{program}

</div><div>

{commands}

{status[0]}

</div></div>

{about} ([more](benchmarks/README.md#ratios)):

{table[0]}

{picture[0]}

## Read on
{readme.partition("## Read on")[2]}"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/site_pages.py FOLDER")
    write(Path(sys.argv[1]))
