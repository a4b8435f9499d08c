"""What the documents name is there: options, files, links, tests, functions, signatures."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import ddp_from_scratch
from ddp_from_scratch import __all__ as public_names
from ddp_from_scratch.training.cli import make_parser
from tests.support.pages import PAGES, anchors, excerpts, links, name_of, prose
from tests.support.ranks import ROOT
from tests.test_api import ROOMS

PACKAGE = Path(ddp_from_scratch.__file__).parent
README = (ROOT / "README.md").read_text()
HOW_IT_WORKS = (ROOT / "docs" / "how-it-works.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TEXT = {name_of(page): page.read_text() for page in PAGES}
GIVEN = {"example.py"}  # a file that the reader makes

on_every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# Signatures -------------------------------------------------------------------------------------

SIGNATURES = re.findall(r"^\| `(\w+)\((.*?)\)` \|", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize(("name", "shown"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_signatures_in_the_table_are_those_of_the_code(name, shown):
    """Names, order, defaults and what is given by name; `...` stands for others."""
    arguments = inspect.signature(getattr(ddp_from_scratch, name)).parameters
    kinds = inspect.Parameter
    by_position, by_name = [], []
    for parameter in arguments.values():
        default = "" if parameter.default is kinds.empty else f"={_short(parameter.default)}"
        of_kind = by_name if parameter.kind is kinds.KEYWORD_ONLY else by_position
        of_kind.append(parameter.name + default)
    parts = shown.split(", ")
    if "..." not in parts:
        assert parts == by_position + ["*"] * bool(by_name) + by_name
        return
    before, behind = parts[: parts.index("...")], parts[parts.index("...") + 1 :]
    if "*" in before:
        assert before[: before.index("*")] == by_position
        positions = [by_name.index(part) for part in before[before.index("*") + 1 :]]
        assert positions == sorted(positions)
    elif "args" not in by_position:
        assert before == by_position[: len(before)]
    assert {part.split("=")[0] for part in behind} <= {name.split("=")[0] for name in by_name}


def _short(default):
    return f"{default:g}" if isinstance(default, float) else repr(default)


def test_the_table_has_signatures():
    assert {"process_group", "Reducer", "check_sync", "SGD"} <= {name for name, _ in SIGNATURES}


def test_every_public_name_is_in_the_reference():
    assert [name for name in public_names if f"`{name}" not in REFERENCE] == []


def test_every_option_of_the_reducer_is_in_the_reference():
    section = REFERENCE.split("\n## Options of Reducer\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(shown) == sorted(inspect.signature(ddp_from_scratch.Reducer).parameters)


# The command line -------------------------------------------------------------------------------


def options_of_run_py():
    return set(re.findall(r"--[a-z][a-z-]+", make_parser("").format_help())) - {"--help"}


OF_OTHERS = {
    "torchrun": {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"},
    "mpirun": {"--oversubscribe", "--mca", "--host"},
    "Slurm": {"--mpi", "--ntasks", "--signal", "--requeue", "--open-mode", "--job-name", "--time"}
    | {"--output"},
    "pip, py-spy": {"--no-binary", "--pid"},
    "tutorials": {"--nodes", "--gpus", "--nr"},
}


@on_every_page
def test_every_option_named_is_one_of_a_program(page):
    sources = [ROOT / "Makefile", *(ROOT / "benchmarks").rglob("*.py")]
    sources += (ROOT / "tests" / "support").glob("*.py")
    benchmarks = set(re.findall(r"--[a-z][a-z-]+", "".join(map(Path.read_text, sources))))
    known = options_of_run_py().union({"--help"}, benchmarks, *OF_OTHERS.values())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT[name_of(page)]))
    assert named - known == set()


def test_every_option_of_run_py_is_in_the_reference():
    section = REFERENCE.split("\n## run.py\n")[1].split("\n## ")[0]
    shown = set(re.findall(r"`(--[a-z-]+)`", section))
    # Defaults, of which the other form is of use.
    assert options_of_run_py() - {"--stop-on-nan"} == shown - {"--help"}


@on_every_page
def test_every_make_target_named_is_there(page):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z-]+)", TEXT[name_of(page)], re.MULTILINE)
    assert set(named) <= targets


@on_every_page
def test_every_module_named_is_there(page):
    named = re.findall(r"python -m ([\w.]+)", TEXT[name_of(page)])
    for name in {name.removesuffix(".NAME") for name in named}:
        if importlib.util.find_spec(name) is None:
            raise AssertionError(name)
        if name == "ddp_from_scratch":
            assert importlib.util.find_spec("ddp_from_scratch.__main__"), name


def test_every_environment_variable_named_is_read_or_set():
    section = REFERENCE.split("\n## Environment variables\n")[1].split("\n## ")[0]
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", section))
    assert "DDP_SECRET" in named
    missing = {name for name in named if name not in source and name.rstrip("12") not in source}
    assert missing == set()
    assert set(re.findall(r'"(DDP_[A-Z0-9_]*[A-Z0-9])"', source)) <= named


# Files, links, tests ----------------------------------------------------------------------------


@on_every_page
def test_every_file_named_is_there(page):
    folders = [PACKAGE, ROOT / "benchmarks", ROOT / "tests", ROOT / "tutorial"]
    for name in set(re.findall(r"`([\w/]+\.py)[`,]", prose(page))) - GIVEN:
        assert (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders), name


@on_every_page
def test_every_link_leads_somewhere(page):
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / path).resolve() for path, _ in links(ROOT / "README.md")}
    assert {page for page in PAGES if (ROOT / "docs") in page.parents} <= linked


def test_every_room_has_its_line_in_the_file_map():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| \[ddp_from_scratch/(\w+)\]", README, re.MULTILINE)) == rooms


def test_every_test_named_is_there():
    section = REFERENCE.split("\n## Features beside others\n")[1]
    named = set(re.findall(r"`(test_\w+)`", section))
    there = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in there} == set()


# The way of a gradient --------------------------------------------------------------------------

STEPS = re.findall(r"^\| \*\*(\w+)\*\* \| .* \| (.*?) \| (.*?) \|$", HOW_IT_WORKS, re.MULTILINE)


def test_the_way_has_five_steps():
    assert [step for step, _, _ in STEPS] == ["ready", "pack", "launch", "wait", "unpack"]


@pytest.mark.parametrize(("step", "files", "functions"), STEPS, ids=[step[0] for step in STEPS])
def test_each_step_of_the_way_is_where_the_map_says(step, files, functions):
    sources = [(PACKAGE / file).read_text() for file in re.findall(r"`([\w/.]+)`", files)]
    for function in re.findall(r"`(\w+)`", functions):
        assert any(f"def {function}(" in source for source in sources), function


def test_functions_named_in_the_story_are_in_their_files():
    named = re.findall(r"\(`(\w+)`\s+in\s+`([\w/]+\.py)`\)", HOW_IT_WORKS)
    assert len(named) >= 2
    for name, file in named:
        assert re.search(rf"(def|class) {name}\b", (PACKAGE / file).read_text()), name


# Contributing -----------------------------------------------------------------------------------


def test_constants_named_for_contributors_are_there():
    folders = (PACKAGE, ROOT / "benchmarks", ROOT / "tests" / "support")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    named = set(re.findall(r"`(_?[A-Z]{2,}(?:_[A-Z]+)+|[A-Z]{6,})`", CONTRIBUTING))
    assert named
    assert {name for name in named if not re.search(rf"^{name}\b", source, re.MULTILINE)} == set()


def test_rooms_are_listed_from_the_bottom_up():
    section = CONTRIBUTING.split("\n## Rooms\n")[1].split("\n## ")[0]
    listed = section.split("From the bottom:")[1].split("`run.py`")[0]
    floors = [set(re.findall(r"`(\w+)`", floor)) for floor in listed.split("·")]
    assert set().union(*floors) == set(ROOMS)
    below = set()
    for floor in floors:
        assert set().union(*(ROOMS[room] for room in floor)) <= below
        below |= floor


def test_pre_commit_runs_the_commands_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert recipe
    assert re.findall(r"entry: (.*)", config) == [
        line.strip().removeprefix("@") for line in recipe[1].splitlines()
    ]
    hooks = config.count("- id:")
    assert config.count("language: system") == config.count("pass_filenames: false") == hooks


def test_shell_excerpts_run_files_that_are_there():
    for excerpt in excerpts("") + excerpts("bash"):
        for file in re.findall(r"(?:python|torchrun\b.*?) ([\w/]+\.py)", excerpt.code):
            assert file in GIVEN or (ROOT / file).exists(), f"{excerpt}: {file}"
