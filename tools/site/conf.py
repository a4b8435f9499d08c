"""Sphinx builds the pages that `site_pages.py` wrote; `make docs` runs both."""

from pathlib import Path
from typing import Any

from api_pages import ROOT
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
html_js_files = ["site.js"]
html_favicon = "static/icon.svg"
# Nothing is fetched from elsewhere, and pages and search work from a folder, without a server.
html_theme_options = {
    "top_of_page_buttons": ["view", "edit"],
    # The address of the repository on GitHub, GitLab or Bitbucket. With it, each page links to its
    # file there, and to the editor. Empty: no links.
    "source_repository": "",
    "source_branch": "main",
}


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


def _add_repository(app: Any, config: Any) -> None:
    """Links each page's footer to the repository, if there is one."""
    if url := config.html_theme_options.get("source_repository"):
        icon = {"name": "Repository", "url": url, "html": "Repository", "class": ""}
        config.html_theme_options["footer_icons"] = [icon]


def _leave_out_generated(app: Any, name: str, _: str, context: dict[str, Any], *rest: Any) -> None:
    """Leaves the links to the repository out of pages that have no file there."""
    is_linked = app.config.html_theme_options.get("source_repository")
    if is_linked and not (ROOT / f"{name}.md").exists():
        context["page_source_suffix"] = ""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("config-inited", _add_repository)
    app.connect("html-page-context", _leave_out_generated)
    app.connect("source-read", _add_contents)
    app.connect("doctree-read", _enlarge)
    app.connect("build-finished", _add_what_if)
