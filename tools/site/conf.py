"""Sphinx builds the pages that `site_pages.py` wrote; `make docs` runs both."""

from pathlib import Path
from typing import Any

from site_pages import CONTENTS, what_if_page

import ddp_from_scratch

project = "ddp_from_scratch"
version = release = ddp_from_scratch.__version__
html_title = f"ddp_from_scratch {version}"
extensions = ["myst_parser", "sphinx_copybutton"]
suppress_warnings = ["toc.not_included"]  # code, which links and lists reach
myst_heading_anchors = 4  # GitHub's
highlight_language = "text"
html_theme = "furo"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_theme_options = {"top_of_page_buttons": ["view"]}
# Nothing is fetched from elsewhere, and pages and search work from a folder, without a server.


def _add_contents(app: Any, name: str, source: list[str]) -> None:
    """Appends a page's part of the table of contents, which plain Markdown cannot say."""
    below = {page: pages for section in CONTENTS.values() for page, pages in section.items()}
    sections = {"": below.get(f"{name}.md", [])}
    if name == "index":
        sections = {caption: list(pages) for caption, pages in CONTENTS.items()}
    for caption, pages in sections.items():
        options = [":hidden:", f":caption: {caption}"] if caption else [":hidden:"]
        lines = [*options, "", *(f"/{page.removesuffix('.md')}" for page in pages)]
        if pages:
            source[0] += "\n".join(["\n```{toctree}", *lines, "```\n"])


def _enlarge(app: Any, document: Any) -> None:
    """Gives pictures a width, since Sphinx links those that have one to their file."""
    for picture in document.findall(lambda node: node.tagname == "image"):
        picture["width"] = "100%"


def _add_what_if(app: Any, exception: Exception | None) -> None:
    """Writes the what-if page beside the page that frames it."""
    if exception is None:
        (Path(app.outdir) / "what_if" / "what_if.html").write_text(what_if_page(), encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("doctree-read", _enlarge)
    app.connect("build-finished", _add_what_if)
