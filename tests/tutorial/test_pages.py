"""The tutorial's pages are complete and in order, and what they name exists."""

import re

import pytest
from PIL import Image

from tests.support.pages import CHAPTERS, TUTORIAL_PAGES, links, name_of
from tests.support.ranks import ROOT
from tutorial import __main__ as program
from tutorial.chapters import samples

TUTORIAL = ROOT / "tutorial"
LIBRARY = ROOT / "ddp_from_scratch"
LINK = re.compile(r"\[([\w/]+\.(?:py|md))\]\(([^)\s]+)\)")


def test_the_first_page_lists_all_chapters_by_their_titles():
    start = TUTORIAL_PAGES[0].read_text()
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)/README.md\)", start, re.MULTILINE)
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in TUTORIAL_PAGES[1:]]
    assert listed == list(zip(titles, (chapter.name for chapter in CHAPTERS), strict=True))
    assert [int(c.name[:2]) for c in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))


def test_chapters_are_complete_and_lead_to_each_other():
    for place, (chapter, path) in enumerate(zip(CHAPTERS, TUTORIAL_PAGES[1:], strict=True)):
        page, name = path.read_text(), name_of(path)
        assert f"python -m pytest tutorial/{chapter.name}" in page, name
        assert "(exercise.py)" in page, name
        assert "\n<details><summary>Hint</summary>\n" in page, name
        assert "\nYou now have " in page, name
        pictures = {picture.name for picture in chapter.glob("*.png")}
        assert set(re.findall(r"!\[.*\]\((.*)\)", page)) == pictures, name
        neighbours = CHAPTERS[max(0, place - 1) : place] + CHAPTERS[place + 1 : place + 2]
        linked = {link for link, _ in links(path)}
        assert {f"../{other.name}/README.md" for other in neighbours} <= linked, name


@pytest.mark.parametrize("path", TUTORIAL_PAGES[1:], ids=lambda path: path.parent.name)
def test_a_page_and_its_pictures_are_of_one_run(path):
    """`python -m tutorial.samples` writes both."""
    for sample in samples(path.read_text()):
        for picture in sample.pictures:
            with Image.open(path.parent / picture) as image:
                of_picture = image.text
            assert of_picture["Command"] == sample.command, picture
            assert of_picture["Output"] == sample.printed, picture
            assert re.match("[0-9a-f]{7}", of_picture["Commit"]), picture


def test_a_link_with_the_name_of_a_file_leads_to_that_file():
    found = [link for path in TUTORIAL_PAGES for link in LINK.findall(path.read_text())]
    assert len(found) > 30
    assert [(label, target) for label, target in found if not target.endswith(label)] == []


def test_the_difference_of_two_chapters_is_shown(capsys, monkeypatch):
    text = "".join(path.read_text() for path in TUTORIAL_PAGES)
    named = set(re.findall(r"python -m tutorial diff (\d\d) (\d\d)", text))
    assert named >= {("06", "07"), ("15", "16")}
    for old, new in named:
        program.print_difference(old, new)
        lines = capsys.readouterr().out.splitlines()
        assert all(any(line.startswith(sign) for line in lines) for sign in ("new: ", "+", "-"))
    with pytest.raises(SystemExit, match=r"no chapter '99': give a number from 01 to \d\d"):
        program.print_difference("06", "99")


def test_the_first_seven_programs_import_nothing_of_the_library():
    for chapter in CHAPTERS[:7]:
        for file in chapter.glob("*.py"):
            assert "ddp_from_scratch" not in file.read_text(), file


def test_the_tables_of_chapter_19_name_what_is_there():
    page = TUTORIAL_PAGES[19].read_text()
    rows = re.findall(r"^\| (.*`.*?) \| (.*?) \| .* \|$", page, re.MULTILINE)
    for _, place in rows:
        found = re.findall(r"\[([\w/.]+)\]\((../../[\w/.]+)\)((?: `\w+`,?)*)", place)
        assert found, place
        for name, path, named in found:
            file = (TUTORIAL_PAGES[19].parent / path).resolve()
            assert file == LIBRARY / name
            there = set(re.findall(r"(?:def|class) (\w+)", file.read_text()))
            assert re.findall(r"`(\w+)`", named), place
            assert set(re.findall(r"`(\w+)`", named)) <= there, place


def test_the_list_of_chapters_names_the_next_step_and_remembers_what_passed(
    tmp_path, monkeypatch, capsys
):
    names = [folder.name for folder in CHAPTERS]
    found = dict.fromkeys(names, "not begun") | {names[0]: "passes", names[1]: "1 of 2 pass"}
    asked = []

    def state_of(folder):
        asked.append(folder.name)
        return found[folder.name]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(program, "PASSED", tmp_path / "build" / "learn.json")
    monkeypatch.setattr(program, "state_of", state_of)
    for expected in (names, names[1:]):
        asked.clear()
        program.list_chapters()
        assert asked == expected
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[-1] for line in lines[:3]] == ["passes", "pass", "begun"]
        assert lines[-1].startswith(f"next: python -m pytest tutorial/{names[1]} ")
    monkeypatch.setattr(program, "digest", lambda folder: "changed")
    asked.clear()
    program.list_chapters()
    assert asked == names
