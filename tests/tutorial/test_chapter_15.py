"""The tables of chapter 15 name what is there, and leave out nothing of chapter 7's algorithm."""

import ast
import re

import pytest

from tests.support.ranks import ROOT
from tests.tutorial.chapters import TUTORIAL

CHAPTER = TUTORIAL / "15_reading_the_library"
PAGE = (CHAPTER / "README.md").read_text()
CHAPTER_7 = TUTORIAL / "07_buckets" / "buckets.py"
LINK = re.compile(r"\[([\w/.]+)\]\((../../[\w/.]+)\)((?: `\w+`,?)*)")


def rows():
    """The first two cells of each row: places in chapter 7, and in the library."""
    cells = re.findall(r"^\| (.*?) \| (.*?) \| .* \|$", PAGE, re.MULTILINE)
    return [row for row in cells if "`" in row[0]]


def definitions(file):
    """The names of a file's functions and classes, methods as `Class.method`, and plain."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            found |= {f"{node.name}.{method}" for method in methods}
    return found


@pytest.mark.parametrize("place", [row[1] for row in rows()])
def test_the_library_has_what_the_tables_name(place):
    links = LINK.findall(place)
    assert links
    for name, path, functions in links:
        file = (CHAPTER / path).resolve()
        assert file == ROOT / "ddp_from_scratch" / name
        there = {name.rpartition(".")[2] for name in definitions(file)}
        named = re.findall(r"`(\w+)`", functions)
        assert named
        assert set(named) <= there


def test_the_tables_have_all_of_chapter_7s_algorithm():
    named = {name for cell, _ in rows() for name in re.findall(r"`([\w.]+)`", cell)}
    parts = {
        n for n in definitions(CHAPTER_7) if n.startswith(("Bucket", "DataParallel", "assign"))
    }
    # A class is named by its methods.
    assert parts - {"DataParallel"} <= named
    assert {name for name in named if "." in name} <= parts


def test_the_five_words_are_there():
    for word in ("ready", "pack", "launch", "wait", "unpack"):
        assert any(cell.startswith(f"{word}: ") for cell, _ in rows()), word


def test_every_other_file_that_is_named_is_there():
    for path in re.findall(r"`([a-z_]+/(?:\w+\.py)?)`", PAGE):
        assert (ROOT / "ddp_from_scratch" / path).exists() or (ROOT / path).exists(), path
