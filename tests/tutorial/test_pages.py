"""The tutorial's pages: complete, short, in order, and what they name is there."""

import ast
import re

from tests.support.pages import CHAPTERS, TUTORIAL_PAGES, links, name_of
from tests.support.ranks import ROOT

TUTORIAL = ROOT / "tutorial"
LIBRARY = ROOT / "ddp_from_scratch"


def test_the_first_page_lists_all_chapters_and_twelve_words():
    start = TUTORIAL_PAGES[0].read_text()
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)/README.md\)", start, re.MULTILINE)
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in TUTORIAL_PAGES[1:]]
    assert listed == list(zip(titles, (chapter.name for chapter in CHAPTERS), strict=True))
    assert [int(c.name[:2]) for c in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))
    glossary = start.split("\n## Twelve words\n")[1]
    assert len(re.findall(r"^\| [a-z]", glossary, re.MULTILINE)) == 12


def test_chapters_are_complete_and_short_and_lead_to_each_other():
    for place, (chapter, path) in enumerate(zip(CHAPTERS, TUTORIAL_PAGES[1:], strict=True)):
        page, name = path.read_text(), name_of(path)
        assert f"python -m pytest tutorial/{chapter.name}" in page, name
        assert "(exercise.py)" in page, name
        pictures = {picture.name for picture in chapter.glob("*.png")}
        assert set(re.findall(r"!\[.*\]\((.*)\)", page)) == pictures, name
        assert page.count("\n") <= 130, name
        assert len(page.split()) <= 1000, name
        neighbours = CHAPTERS[max(0, place - 1) : place] + CHAPTERS[place + 1 : place + 2]
        linked = {link for link, _ in links(path)}
        assert {f"../{other.name}/README.md" for other in neighbours} <= linked, name


def functions(file):
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found


def test_the_first_seven_programs_import_nothing_of_the_library():
    for chapter in CHAPTERS[:7]:
        for program in chapter.glob("*.py"):
            assert "ddp_from_scratch" not in program.read_text(), program


def test_the_tables_of_chapter_15_name_what_is_there():
    page = TUTORIAL_PAGES[15].read_text()
    rows = re.findall(r"^\| (.*`.*?) \| (.*?) \| .* \|$", page, re.MULTILINE)
    for _, place in rows:
        found = re.findall(r"\[([\w/.]+)\]\((../../[\w/.]+)\)((?: `\w+`,?)*)", place)
        assert found, place
        for name, path, named in found:
            file = (TUTORIAL_PAGES[15].parent / path).resolve()
            assert file == LIBRARY / name
            there = {name.rpartition(".")[2] for name in functions(file)}
            assert re.findall(r"`(\w+)`", named), place
            assert set(re.findall(r"`(\w+)`", named)) <= there, place


def test_chapter_15_shows_the_lines_of_chapter_7_and_of_the_library():
    page = TUTORIAL_PAGES[15].read_text()
    sections = re.findall(
        r"\]\(../../ddp_from_scratch/([\w/.]+)\):\n\n```diff\n(.*?)```", page, re.DOTALL
    )
    assert len(sections) == page.count("```diff") == 4
    for name, difference in sections:
        files = {"-": TUTORIAL / "07_buckets" / "buckets.py", "+": LIBRARY / name}
        for sign, path in files.items():
            shown = [line[1:].strip() for line in difference.splitlines() if line[0] == sign]
            rest = iter(path.read_text().split("\n"))
            lost = [line for line in shown if not any(line == other.strip() for other in rest)]
            assert lost == [], name  # in this order
