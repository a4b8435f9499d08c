"""`make docs`: the site holds every page, and its links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from functools import cache
from html import unescape
from urllib.parse import unquote

import pytest

from tests.support.pages import PAGES, name_of
from tests.support.ranks import ROOT
from tests.test_api import ROOMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="there is no mkdocs"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built by the commands of `make docs` into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    train, build, _ = (
        line.replace(".venv/bin/python", sys.executable) for line in recipe.split("\n\t")
    )
    build = build.replace(".venv/bin/mkdocs", f"{sys.executable} -m mkdocs")
    for command in (train, f"{build} --site-dir {folder}"):
        subprocess.run(command, shell=True, cwd=ROOT, timeout=100, check=True)
    return folder


@cache
def targets(page):
    """What a page links to, and the anchors that it has."""
    text = page.read_text()
    links = re.findall(r'<(?!base\b)[^>]*?\s(?:href|src)="?([^"\s>]+)', text)
    return links, set(re.findall(r'\s(?:id|name)="?([^"\s>]+)', text))


def test_every_page_is_there_and_links_lead_somewhere(site):
    names = [
        name_of(page).replace("README.md", "index.md").replace(".md", ".html") for page in PAGES
    ]
    names += [f"ddp_from_scratch/{room}/index.html" for room in ROOMS]
    assert [name for name in names if not (site / name).is_file()] == []
    reducer = (site / "ddp_from_scratch/reducer/index.html").read_text()
    assert "All-reduces the gradients of a module" in reducer
    count = 0
    for page in site.rglob("*.html"):
        # Nothing is fetched from elsewhere.
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]*)"', text)
        loaded += re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="(https?:[^"]*)"', text)
        assert not loaded, page.relative_to(site)
        if page.name in ("404.html", "timeline.html"):  # at any address; a program's own
            continue
        for link in targets(page)[0]:
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = map(unquote, unescape(link).partition("#"))
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), f"{page.relative_to(site)}: {link}"
            known = not anchor or found.suffix != ".html" or anchor in targets(found)[1]
            assert known, f"{page.relative_to(site)}: {link}"
            count += 1
    assert count > 1000
