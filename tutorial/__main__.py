"""Lists the chapters and says which of your exercises pass; shows how two programs differ.

python -m tutorial
python -m tutorial diff 06 07
"""

import ast
import hashlib
import io
import json
import os
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from difflib import unified_diff
from importlib.metadata import version

from tutorial.chapters import CHAPTERS, TUTORIAL, chapter, page, programs

COLOURS = {"passes": 32, "not begun": 90, "+": 32, "-": 31, "@": 36}
# By chapter, a checksum of what its tests depend on, which passed: they need not run again.
PASSED = TUTORIAL.parent / "build" / "learn.json"
ALL_PASS = "every exercise passes: docs/how-it-works.md and CONTRIBUTING.md lead into the library"


def begun(folder):
    """Returns True if a function of exercise.py has no `raise NotImplementedError` any more."""
    code = ast.parse((folder / "exercise.py").read_text())
    functions = [node for node in ast.walk(code) if isinstance(node, ast.FunctionDef)]
    gap = "raise NotImplementedError"
    return any(gap not in ast.unparse(function) for function in functions)


class Results:
    """A pytest plugin that collects which cases of each test pass."""

    def __init__(self):
        self.of = defaultdict(list)

    def pytest_runtest_logreport(self, report):
        """Called by pytest for each phase of a test."""
        test = report.nodeid.partition("::")[2].partition("[")[0]
        self.of[test].append(report.passed)


def state_of(folder):
    """Returns the state of a chapter; runs its tests if you have begun it."""
    if not begun(folder):
        return "not begun"
    import pytest

    results = Results()
    with redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", str(folder)], plugins=[results])
    tests = [all(cases) for cases in results.of.values()]
    if not tests:
        return "cannot be imported"
    return "passes" if all(tests) else f"{sum(tests)} of {len(tests)} pass"


def digest(folder):
    """Returns a checksum of what the result of a chapter's tests depends on."""
    library = (TUTORIAL.parent / "ddp_from_scratch").rglob("*.py")
    files = sorted([*folder.glob("*.py"), *TUTORIAL.glob("*.py"), *library])
    found = hashlib.sha256(f"{sys.version} {version('torch')}".encode())
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def next_step(folder, state):
    """Returns a line about the first chapter that does not pass."""
    place = "tutorial/" + folder.name
    if state == "not begun":
        return f"next: read {place}/README.md, then fill the gaps in {place}/exercise.py"
    return f"next: python -m pytest {place} says what is missing in {place}/exercise.py"


def coloured(text, state):
    """Returns the text in the colour of the state, if a person reads it."""
    return f"\033[{COLOURS.get(state, 33)}m{text}\033[0m" if sys.stdout.isatty() else text


def list_chapters():
    """Prints a line for each chapter, and the next step. Remembers which chapters have passed."""
    os.chdir(TUTORIAL.parent)
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    step = ""
    for folder in CHAPTERS:
        title = page(folder).read_text().splitlines()[0].removeprefix("# ")
        place = "tutorial/" + folder.name
        print(f"{title:<44} {place:<32} ", end="", flush=True)  # the tests take a while
        code = digest(folder)
        state = "passes" if passed.get(folder.name) == code else state_of(folder)
        print(coloured(state, state), flush=True)
        if state == "passes":
            passed[folder.name] = code
            PASSED.parent.mkdir(exist_ok=True)
            PASSED.write_text(json.dumps(passed, indent=1))
        elif not step:
            step = next_step(folder, state)
    print(f"\n{step or ALL_PASS}")


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
