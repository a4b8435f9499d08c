"""Every Python excerpt of the documents runs as printed, from a file of its own."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.failing_run import LAUNCHERS, Run
from tests.support.pages import Excerpt, excerpts
from tests.support.ranks import ROOT
from tests.support.tiers import slow

pytestmark = pytest.mark.program

PYTHON = excerpts("python")
(README,) = [excerpt for excerpt in PYTHON if excerpt.page == ROOT / "README.md"]
TESTS = [excerpt for excerpt in PYTHON if "\ndef test_" in excerpt.code]
ON_MPI = [excerpt for excerpt in PYTHON if re.search(r'"mpi"\)|mpi\.BACKEND', excerpt.code)]
# Shown to fail: `test_the_example_of_the_guide` runs it.
FAILING = [excerpt for excerpt in PYTHON if "# no other rank calls it" in excerpt.code]
ON_GLOO = [excerpt for excerpt in PYTHON if excerpt not in ON_MPI + TESTS + FAILING]
ON_MPI.append(replace(README, code=README.code.replace('("gloo")', '("mpi")')))


def run(code: str, world_size: int, folder: Path) -> str:
    file = folder / "example.py"
    file.write_text(code)
    return forked.run([str(file)], world_size, folder)


def check_readme(output: str, world_size: int) -> None:
    printed = re.findall(r"rank (\d) of (\d): parameters ([0-9a-f]{16})", output)
    ranks = [(str(rank), str(world_size)) for rank in range(world_size)]
    assert sorted((rank, size) for rank, size, _ in printed) == ranks
    assert len({checksum for _, _, checksum in printed}) == 1


def in_first_tier(excerpt: Excerpt) -> bool:
    # Those that start ranks import torch again.
    is_first = str(excerpt).startswith(("README.md", "docs/how-to/start.md"))
    return is_first and "start_ranks(" not in excerpt.code


@pytest.mark.parametrize("excerpt", [e if in_first_tier(e) else slow(e) for e in ON_GLOO], ids=str)
def test_runs_as_printed(excerpt: Excerpt, tmp_path):
    printed = run(excerpt.code, 1 if "start_ranks(" in excerpt.code else 2, tmp_path)
    assert excerpt.prints in printed
    if excerpt is README:
        check_readme(printed, 2)
        check_readme(run(excerpt.code, 1, tmp_path), 1)


# One mpirun for all, since MPI lives as long as its process.
ONE_AFTER_ANOTHER = """
import runpy, sys
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
"""


@pytest.mark.slow
def test_runs_as_printed_under_mpirun(tmp_path):
    files = [tmp_path / f"{number}.py" for number in range(len(ON_MPI))]
    for file, excerpt in zip(files, ON_MPI, strict=True):
        file.write_text(excerpt.code)
    command = *LAUNCHERS["mpirun"], "-c", ONE_AFTER_ANOTHER, *map(str, files)
    with Run("env", "-C", str(tmp_path), *command) as run:
        assert run.wait(110) == 0, run.text
        check_readme(run.out, 2)  # the last one


def call_by_name(world, code: str, function: str, *arguments: object) -> object:
    """On a rank: a function of an excerpt, which the rank cannot import."""
    names: dict[str, object] = {}
    exec(code, names)
    return names[function](world, *arguments)  # type: ignore[operator]


@pytest.mark.parametrize("excerpt", TESTS, ids=str)
def test_the_example_of_a_test_passes(excerpt: Excerpt, ranks):
    def crew(backend, world_size):
        return lambda function, *arguments: ranks(backend, world_size)(
            call_by_name, excerpt.code, function.__name__, *arguments
        )

    names: dict[str, object] = {}
    exec(excerpt.code, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(crew)
