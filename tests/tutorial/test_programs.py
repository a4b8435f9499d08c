"""The tutorial's programs print what their chapters show, and draw; exercises and solutions."""

import ast
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from tests.support.pages import CHAPTERS, TUTORIAL_PAGES
from tests.support.ranks import ROOT
from tests.support.tiers import slow
from tests.tutorial.test_pages import functions

TUTORIAL = ROOT / "tutorial"
# Each command of a program with the output that its page shows, at once or further below.
SAMPLE = r"^```\n(python -m tutorial\.[^\n]+)\n```$.*?^```text\n(.*?)^```$"
SAMPLES = [
    sample
    for page in TUTORIAL_PAGES[1:]
    for sample in re.findall(SAMPLE, page.read_text(), re.DOTALL | re.MULTILINE)
]
PROGRAMS = sorted(
    program
    for chapter in CHAPTERS
    for program in chapter.glob("*.py")
    if program.name not in ("exercise.py", "solution.py", "test_exercise.py")
)


def module_of(program):
    return ".".join(program.relative_to(ROOT).with_suffix("").parts)


def form(text):
    """The words of a text, line by line; each number is 0, and what is spaced is one word."""
    lines = [re.sub(r"-?\d[\d.,]*(e[+-]\d+)?", "0", line) for line in text.strip().splitlines()]
    return [line.split() for line in lines]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in this process and an empty folder; returns what it prints."""
    pytest.importorskip("matplotlib")  # without it the programs draw nothing, and say so

    def run(command):
        _, _, module, *arguments = command.split()
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, module, raising=False)  # where a test has imported it
        # Not by a new Python: the ranks of all programs come from one server that imports torch.
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        output = capsys.readouterr().out
        for picture in re.findall(r"^picture: (.*)$", output, re.MULTILINE):
            assert (tmp_path / picture).stat().st_size > 1000
        return output

    return run


# A few chapters take as long as all others together.
@pytest.mark.parametrize(
    ("command", "printed"),
    [slow(*s) if re.search(r"--|\.(04|05|06|07|08|09|12|13)_", s[0]) else s for s in SAMPLES],
    ids=[command.removeprefix("python -m tutorial.") for command, _ in SAMPLES],
)
def test_prints_what_the_chapter_shows(command, printed, run):
    assert form(run(command)) == form(printed)


def test_every_program_is_shown():
    assert {command.split()[2] for command, _ in SAMPLES} == set(map(module_of, PROGRAMS))


# The naive loop, buckets and one copy of the optimizer's state, on other numbers of ranks.
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["04_naive.naive", "07_buckets.buckets", "12_one_copy.one_copy"]
)
def test_runs_on_more_ranks(program, run):
    assert "picture: " in run(f"python -m tutorial.{program} --nproc 4")


def python(*arguments, folder=ROOT, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        **{"capture_output": True, "text": True, "timeout": 100, "cwd": folder, **options},
    )


@pytest.mark.slow
def test_runs_from_a_shell(tmp_path):
    picture = tmp_path / "folder" / "picture.svg"
    done = python("-m", "tutorial.05_flat.flat", "--picture", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"picture: {picture}" in done.stdout
    assert picture.read_text().startswith("<?xml")


# Exercises ---------------------------------------------------------------------------------------


class Reports:
    def __init__(self):
        self.of = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.of.append(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "outcome"), [((), "failed"), (("--solution",), "passed")], ids=str
)
def test_exercises_fail_as_shipped_and_solutions_pass(options, outcome):
    reports = Reports()
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "", *options, str(TUTORIAL)]
    with redirect_stdout(io.StringIO()):
        pytest.main(arguments, plugins=[reports])
    assert {r.nodeid.split("/")[-2] for r in reports.of} == {c.name for c in CHAPTERS}
    for report in reports.of:
        assert report.outcome == outcome, report.longreprtext
        assert outcome == "passed" or "NotImplementedError: " in report.longreprtext


def learn(folder=ROOT):
    """The lines that `python -m tutorial` prints."""
    done = python("-m", "tutorial", folder=folder)
    assert "\033" not in done.stdout
    return done.stdout.splitlines()


def test_learn_lists_nothing_begun():
    lines = learn()
    assert [re.search(r"tutorial/(\w+)", line)[1] for line in lines] == [c.name for c in CHAPTERS]
    assert all(line.endswith("not begun") for line in lines)
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads on
    done = python("-m", "tutorial", capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_learn_counts_what_passes(tmp_path):
    shutil.copytree(TUTORIAL, tmp_path / "tutorial")
    first, second = (tmp_path / "tutorial" / chapter.name for chapter in CHAPTERS[:2])
    shutil.copy(first / "solution.py", first / "exercise.py")
    half, solution = (ast.parse((second / f"{n}.py").read_text()) for n in ("exercise", "solution"))
    one = next(iter(functions(second / "exercise.py")))
    for module in (half, solution):
        module.body.sort(key=lambda node: getattr(node, "name", "") == one)
    half.body[-1] = solution.body[-1]
    (second / "exercise.py").write_text(ast.unparse(half))
    lines = learn(tmp_path)
    assert lines[0].endswith(" passes"), lines
    assert re.search(r" 1 of \d pass$", lines[1]), lines
    assert all(line.endswith("not begun") for line in lines[2:])
