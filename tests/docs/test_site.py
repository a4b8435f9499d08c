"""`make docs`: the site holds every page."""

import importlib.util
import re
import subprocess
import sys

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
    folder = tmp_path_factory.mktemp("site")
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    train, build, _ = (
        line.replace(".venv/bin/python", sys.executable) for line in recipe.split("\n\t")
    )
    build = build.replace(".venv/bin/mkdocs", f"{sys.executable} -m mkdocs")
    for command in (train, f"{build} --site-dir {folder}"):
        subprocess.run(command, shell=True, cwd=ROOT, timeout=100, check=True)
    return folder


def test_every_page_is_there_and_nothing_is_fetched_from_elsewhere(site):
    """mkdocs itself looks at links and anchors (`--strict`)."""
    names = [
        name_of(page).replace("README.md", "index.md").replace(".md", ".html") for page in PAGES
    ]
    names += [f"ddp_from_scratch/{room}/index.html" for room in ROOMS]
    assert [name for name in names if not (site / name).is_file()] == []
    reducer = (site / "ddp_from_scratch/reducer/index.html").read_text()
    assert "All-reduces the gradients of a module" in reducer
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]*)"', text)
        loaded += re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="(https?:[^"]*)"', text)
        assert not loaded, page.relative_to(site)
