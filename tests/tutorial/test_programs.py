"""Every program of the tutorial runs as its chapter says, prints what is shown there, and draws."""

import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT
from tests.support.tiers import slow
from tests.tutorial.chapters import CHAPTERS, samples

pytest.importorskip("matplotlib")  # without it the programs draw nothing, and say so

SAMPLES = [sample for chapter in CHAPTERS for sample in samples(chapter / "README.md")]
PROGRAMS = sorted(
    program
    for chapter in CHAPTERS
    for program in chapter.glob("*.py")
    if program.name not in ("exercise.py", "solution.py", "test_exercise.py")
)


def form(text):
    """The words of a text, line by line; each number is 0, and what is spaced is one word."""
    lines = [re.sub(r"-?\d[\d.,]*(e[+-]\d+)?", "0", line) for line in text.strip().splitlines()]
    return [line.split() for line in lines]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in this process and an empty folder; returns what it prints."""

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


@pytest.mark.parametrize(("command", "printed"), SAMPLES, ids=[command for command, _ in SAMPLES])
def test_prints_what_the_chapter_shows(command, printed, run):
    assert form(run(command)) == form(printed)


def cases():
    """Each program with 2 ranks and with 4; those that take 2 anyway are run above."""
    found = []
    for program in PROGRAMS:
        code = program.read_text()
        if "options.nproc" in code:
            if "nproc=2" not in code:
                found.append((program, 2))
            found.append(slow(program, 4))
    return found


@pytest.mark.parametrize(("program", "nproc"), cases(), ids=lambda a: getattr(a, "stem", a))
def test_runs_on_ranks(program, nproc, run):
    module = ".".join(program.relative_to(ROOT).with_suffix("").parts)
    assert "picture: " in run(f"python -m {module} --nproc {nproc}")


def test_every_program_is_shown():
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in PROGRAMS}
    assert {command.split()[2] for command, _ in SAMPLES} == modules


FIRST_SEVEN = [program for program in PROGRAMS if program.parent.name < "08"]


@pytest.mark.parametrize("program", FIRST_SEVEN, ids=lambda program: program.stem)
def test_imports_nothing_of_the_library(program):
    assert "ddp_from_scratch" not in program.read_text()


# One process, ranks that one process starts, mpirun; all others start and end in the same way.
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [command for command, _ in SAMPLES if re.search(r"\.(01|05|08|14)_", command)],
)
def test_runs_from_a_shell(command, tmp_path):
    picture = tmp_path / "folder" / "picture.svg"
    done = subprocess.run(
        [sys.executable, *command.split()[1:], "--picture", str(picture)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"picture: {picture}" in done.stdout
    assert picture.read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_help(program):
    module = ".".join(program.relative_to(ROOT).with_suffix("").parts)
    help_of = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(help_of, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python -m {module} ")
    assert ("--nproc" in done.stdout) == ("options.nproc" in program.read_text())
