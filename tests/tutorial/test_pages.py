"""The tutorial's pages: links lead somewhere, commands are there, chapters are alike and short."""

import re

import pytest

from tests.support.pages import anchors, links
from tests.support.ranks import ROOT
from tests.tutorial.chapters import CHAPTERS, PAGES, TUTORIAL, commands

START = (TUTORIAL / "README.md").read_text()
in_every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)


def test_chapters_are_numbered():
    assert [int(chapter.name[:2]) for chapter in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))


def test_the_first_page_lists_all_chapters_with_their_titles():
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)/README.md\)", START, re.MULTILINE)
    titles = [(chapter / "README.md").read_text().splitlines()[0] for chapter in CHAPTERS]
    assert listed == [
        (title.removeprefix("# "), chapter.name)
        for title, chapter in zip(titles, CHAPTERS, strict=True)
    ]


def test_the_glossary_has_twelve_words():
    glossary = START.split("\n## Twelve words\n")[1]
    assert len(re.findall(r"^\| [a-z]", glossary, re.MULTILINE)) == 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_link_leads_somewhere(page):
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_command_is_of_a_program_or_a_test_that_is_there(page):
    for command in commands(page):
        program = re.match(r"python -m (tutorial[\w.]*)", command)
        tests = re.match(r"python -m pytest (tutorial/\w+)", command)
        if program:
            assert (ROOT / (program[1].replace(".", "/") + ".py")).exists(), command
        else:
            assert tests, command
            assert (ROOT / tests[1] / "test_exercise.py").exists(), command


@in_every_chapter
def test_a_chapter_is_complete_and_short(chapter):
    page = (chapter / "README.md").read_text()
    assert f"python -m pytest tutorial/{chapter.name}" in page
    assert "(exercise.py)" in page
    assert set(re.findall(r"!\[.*\]\((.*)\)", page)) == {p.name for p in chapter.glob("*.png")}
    assert page.count("\n") <= 130
    assert len(page.split()) <= 1000


@in_every_chapter
def test_chapters_lead_to_each_other(chapter):
    found = [path for path, _ in links(chapter / "README.md") if path.endswith("README.md")]
    place = CHAPTERS.index(chapter)
    others = CHAPTERS[max(0, place - 1) : place] + CHAPTERS[place + 1 : place + 2]
    assert {f"../{other.name}/README.md" for other in others} <= set(found)
