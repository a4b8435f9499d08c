"""The tutorial's programs print what their chapters show, and draw; exercises and solutions."""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from tests.support.pages import CHAPTERS, TUTORIAL_PAGES
from tests.support.ranks import ROOT
from tests.support.tiers import slow
from tutorial.chapters import programs, samples

pytestmark = pytest.mark.program

TUTORIAL = ROOT / "tutorial"
SAMPLES = [
    (sample.command, sample.printed)
    for page in TUTORIAL_PAGES[1:]
    for sample in samples(page.read_text())
    if sample.command.startswith("python ")  # test_chapter_14.py has the others
]
PROGRAMS = [program for chapter in CHAPTERS for program in programs(chapter)]


def module_of(program):
    return ".".join(program.relative_to(ROOT).with_suffix("").parts)


def form(text):
    """The words of a text, line by line; each number is 0, and what is spaced is one word."""
    lines = [re.sub(r"-?\d[\d.,]*(e[+-]\d+)?", "0", line) for line in text.strip().splitlines()]
    return [line.split() for line in lines]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
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
LONG = re.compile(r"--|\.(04|05|06|07|08|09|12|13|16|17|20)_")


@pytest.mark.parametrize(
    ("command", "printed"),
    [slow(*sample) if LONG.search(sample[0]) else sample for sample in SAMPLES],
    ids=[command.removeprefix("python -m tutorial.") for command, _ in SAMPLES],
)
def test_prints_what_the_chapter_shows(command, printed, run):
    assert form(run(command)) == form(printed)


def test_every_program_is_shown():
    assert {command.split()[2] for command, _ in SAMPLES} == set(map(module_of, PROGRAMS))


@pytest.mark.slow
def test_a_program_with_ranks_runs_by_its_path_from_any_folder(tmp_path):
    """tests/test_package.py tries `--help` of all programs."""
    pytest.importorskip("matplotlib")
    program = TUTORIAL / "03_all_reduce" / "ring.py"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environ, text=True, timeout=100)
    assert form(printed) == form(dict(SAMPLES)["python -m tutorial.03_all_reduce.ring"])
    assert (tmp_path / "tutorial-pictures" / "ring.png").exists()


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


def test_learn_lists_nothing_begun():
    command = [sys.executable, "-m", "tutorial"]
    printed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=100)
    listed, _, following = printed.partition("\n\n")
    lines = listed.splitlines()
    assert [re.search(r"tutorial/(\w+)", line)[1] for line in lines] == [c.name for c in CHAPTERS]
    assert following.startswith("next: read tutorial/01_one_process/README.md")
    assert all(line.endswith("not begun") for line in lines)
