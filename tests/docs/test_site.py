"""The tree of Markdown that the site is built from."""

import re

import pytest

import ddp_from_scratch
from tests.support.pages import PAGES, anchors, links, name_of
from tests.support.ranks import ROOT


def test_the_site_has_all_pages_names_and_no_dead_link(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import site_pages as module

    module.write(folder := tmp_path)
    dead = [
        f"{page.relative_to(folder)}: {path}#{anchor}"
        for page in folder.rglob("*.md")
        for path, anchor in links(page)
        for target in [(page.parent / path).resolve() if path else page]
        if not target.is_file() or (anchor and anchor not in anchors(target))
    ]
    assert dead == []
    assert "ResNet-18" in module.what_if_page()
    chapters = [(folder / name).read_text() for name in module.CHAPTERS]
    assert [text[:40] for text in chapters if re.search("^(Back|Next): ", text, re.MULTILINE)] == []
    listed = {page for section in module.CONTENTS.values() for page in section}
    assert [page for page in listed if not (folder / page).is_file()] == []
    assert listed | {"README.md"} >= {name_of(page) for page in PAGES}
    entries = module.api_pages.ENTRY_OF
    assert sorted(entries) == sorted(ddp_from_scratch.__all__)
    names = (folder / "docs" / "reference.md").read_text()
    for name, entry in entries.items():
        page = folder / "api" / f"{entry}.md"
        assert name.lower() in anchors(page), name
        assert "```python\n" in page.read_text(), name  # its example
        assert re.search(rf"\[`{name}\b[^`]*`\]\(\.\./api/{entry}.md#{name.lower()}\)", names), name


REPOSITORY = "https://github.com/someone/ddp_from_scratch"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Sphinx and its extensions
@pytest.mark.parametrize("repository", ["", REPOSITORY])
def test_pages_link_to_a_repository_by_one_setting(repository, tmp_path, monkeypatch):
    application = pytest.importorskip("sphinx.application")
    pytest.importorskip("furo")
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = tmp_path / "pages"
    for name in ("docs/glossary.md", "api/Reducer.md", "what_if/README.md"):  # only one has a file
        (pages / name).parent.mkdir(parents=True)
        (pages / name).write_text("# A page\n")
    (pages / "index.md").write_text("# Start\n\n[one](docs/glossary.md), [two](api/Reducer.md)\n")
    built = [tmp_path / name for name in ("site", "doctrees")]
    options = {"html_theme_options.source_repository": repository}
    app = application.Sphinx(
        *(pages, ROOT / "tools/site", *built, "html", options), status=None, warning=None
    )
    app.build()
    glossary, reducer = (
        (built[0] / f"{name}.html").read_text() for name in ("docs/glossary", "api/Reducer")
    )
    edit, view = (f"{REPOSITORY}/{verb}/main/docs/glossary.md" for verb in ("edit", "blob"))
    assert (edit in glossary) == (view in glossary) == bool(repository)
    assert (f'href="{REPOSITORY}"' in glossary) == bool(repository)
    assert "/edit/" not in reducer
    assert "/blob/" not in reducer
