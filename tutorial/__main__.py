"""Lists the chapters and says which of your exercises pass; shows how two programs differ.

python -m tutorial
python -m tutorial diff 06 07
"""

import ast
import io
import os
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from difflib import unified_diff
from pathlib import Path

from tutorial.chapters import CHAPTERS, TUTORIAL, chapter, page, programs

COLOURS = {"passes": 32, "not begun": 90, "+": 32, "-": 31, "@": 36}


def begun(folder):
    """Returns True if a function of exercise.py has no `raise NotImplementedError` any more."""
    code = ast.parse((folder / "exercise.py").read_text())
    functions = [node for node in ast.walk(code) if isinstance(node, ast.FunctionDef)]
    gap = "raise NotImplementedError"
    return any(gap not in ast.unparse(function) for function in functions)


class Results:
    """A pytest plugin that collects, by file, which cases of each test pass."""

    def __init__(self):
        self.of = defaultdict(lambda: defaultdict(list))

    def pytest_runtest_logreport(self, report):
        """Called by pytest for each phase of a test."""
        file, _, test = report.nodeid.partition("::")
        self.of[Path(file).parent.name][test.partition("[")[0]].append(report.passed)


def states(chapters):
    """Yields each chapter's state; runs the tests of the chapters that you have begun."""
    results = Results()
    tested = [str(folder) for folder in chapters if begun(folder)]
    if tested:
        import pytest

        with redirect_stdout(io.StringIO()):
            pytest.main(["-q", "-p", "no:cacheprovider", *tested], plugins=[results])
    for folder in chapters:
        tests = [all(cases) for cases in results.of[folder.name].values()]
        if not begun(folder):
            yield folder, "not begun"
        elif not tests:
            yield folder, "cannot be imported"
        else:
            passes = tests and all(tests)
            yield folder, "passes" if passes else f"{sum(tests)} of {len(tests)} pass"


def coloured(text, state):
    """Returns the text in the colour of the state, if a person reads it."""
    return f"\033[{COLOURS.get(state, 33)}m{text}\033[0m" if sys.stdout.isatty() else text


def list_chapters():
    """Prints a line for each chapter."""
    os.chdir(TUTORIAL.parent)
    for folder, state in states(CHAPTERS):
        title = page(folder).read_text().splitlines()[0].removeprefix("# ")
        place = "tutorial/" + folder.name
        print(f"{title:<44} {place:<32} {coloured(state, state)}", flush=True)


def definitions(text):
    """Returns `{name: code}` of a program's functions and classes."""
    nodes = [node for node in ast.parse(text).body if hasattr(node, "name")]
    return {node.name: ast.unparse(node) for node in nodes}


def print_difference(*numbers):
    """Prints what changes from a chapter's program to another's; of several, the first."""
    files = []
    for number in numbers:
        found = programs(chapter(number))
        if not found:
            sys.exit(f"chapter {number} has no program to compare: give another number")
        files.append(found[0])
    texts = [file.read_text() for file in files]
    old, new = map(definitions, texts)
    print("new:    ", ", ".join(n for n in new if n not in old) or "nothing")
    print("gone:   ", ", ".join(n for n in old if n not in new) or "nothing")
    print("changed:", ", ".join(n for n in new if old.get(n, new[n]) != new[n]) or "nothing")
    names = [str(file.relative_to(TUTORIAL.parent)) for file in files]
    for line in unified_diff(*map(str.splitlines, texts), *names, lineterm=""):
        print(coloured(line, line[0]) if line[0] in "+-@" else line)


def main():
    """Does what the command line says."""
    match sys.argv[1:]:
        case []:
            list_chapters()
        case ["diff", old, new]:
            print_difference(old, new)
        case ["-h" | "--help"]:
            print(__doc__)
        case other:
            sys.exit(f"unknown arguments {' '.join(other)!r}: give none, or diff and two chapters")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # `python -m tutorial | head -3` has read enough
        # Python flushes the stream again when it exits; that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
