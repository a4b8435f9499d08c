"""Exercises fail as shipped, with a sentence that says what to write; solutions pass."""

import ast
import io
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from tests.support.ranks import ROOT
from tests.tutorial.chapters import CHAPTERS, TUTORIAL

in_every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)


def functions(file):
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef)]


@in_every_chapter
def test_every_function_has_a_gap_and_a_task(chapter):
    gaps = functions(chapter / "exercise.py")
    assert gaps
    for gap in gaps:
        assert ast.get_docstring(gap), gap.name
        raised = re.findall(r"raise NotImplementedError\((.*)\)", ast.unparse(gap))
        assert len(raised) == 1, gap.name
        assert len(raised[0]) > 20, gap.name
    assert {gap.name for gap in gaps} <= {f.name for f in functions(chapter / "solution.py")}


class Reports:
    def __init__(self):
        self.of = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.of.setdefault(report.nodeid.split("/")[-2], []).append(report)


def results(*arguments):
    """The reports of a pytest of all chapters, in this process, by chapter."""
    reports = Reports()
    with redirect_stdout(io.StringIO()):
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "-m", "", *arguments, str(TUTORIAL)], plugins=[reports]
        )
    return reports.of


@pytest.fixture(scope="module")
def shipped():
    return results()


@pytest.fixture(scope="module")
def solved():
    return results("--solution")


@in_every_chapter
def test_every_exercise_fails_as_shipped_and_says_what_to_write(chapter, shipped):
    for report in shipped[chapter.name]:
        assert report.outcome == "failed", report.nodeid
        assert "NotImplementedError: " in report.longreprtext, report.longreprtext


@in_every_chapter
def test_solutions_pass(chapter, solved):
    for report in solved[chapter.name]:
        assert report.outcome == "passed", report.longreprtext


def test_learn_lists_nothing_begun():
    done = subprocess.run(
        [sys.executable, "-m", "tutorial"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert [re.search(r"tutorial/(\w+)", line)[1] for line in lines] == [c.name for c in CHAPTERS]
    assert all(line.endswith("not begun") for line in lines)
    assert "\033" not in done.stdout


def test_learn_ends_well_where_nobody_reads_on():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "tutorial"],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_learn_counts_what_passes(tmp_path):
    shutil.copytree(TUTORIAL, tmp_path / "tutorial")
    first, second = (tmp_path / "tutorial" / chapter.name for chapter in CHAPTERS[:2])
    shutil.copy(first / "solution.py", first / "exercise.py")
    half = second / "exercise.py"
    solution = ast.parse((second / "solution.py").read_text())
    learner = ast.parse(half.read_text())
    one = functions(half)[0].name
    for module in (solution, learner):
        module.body.sort(key=lambda node: getattr(node, "name", "") == one)
    learner.body[-1] = solution.body[-1]
    half.write_text(ast.unparse(learner))
    done = subprocess.run(
        [sys.executable, "-m", "tutorial"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" passes"), done
    assert re.search(r" 1 of \d pass$", lines[1]), done
    assert all(line.endswith("not begun") for line in lines[2:])
