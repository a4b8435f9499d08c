"""The tree of Markdown that the site is built from."""

import re

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
