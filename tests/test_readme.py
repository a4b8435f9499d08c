"""The README's and the guide's code and commands are those of the project."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_from_scratch
from ddp_from_scratch import __all__ as public_names
from ddp_from_scratch.training.cli import make_parser
from tests.support.ranks import MPIRUN, ROOT
from tests.support.tiers import slow

README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable],
        slow([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]),
        ["mpirun", "-n", "2", sys.executable],
    ],
    ids=["alone", "torchrun", "mpirun"],
)
def test_the_example_runs_as_it_stands(tmp_path, launcher):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    if launcher[0] == "mpirun":
        code = code.replace('process_group("gloo")', 'process_group("mpi")')
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [*launcher, str(tmp_path / "example.py")],
        env=os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    world_size = 1 if len(launcher) == 1 else 2
    printed = re.findall(r"rank (\d) of (\d): parameters ([0-9a-f]{16})", done.stdout)
    assert sorted(rank for rank, _, _ in printed) == [str(rank) for rank in range(world_size)]
    assert {size for _, size, _ in printed} == {str(world_size)}
    assert len({checksum for _, _, checksum in printed}) == 1


SIGNATURES = re.findall(r"^\| `(\w+)\((.*?)\)` \|", README, re.MULTILINE)


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


def test_every_public_name_is_in_the_readme():
    assert [name for name in public_names if f"`{name}" not in README] == []


def test_every_option_named_is_one_of_run_py():
    known = set(re.findall(r"--[a-z][a-z-]+", make_parser("").format_help()))
    of_others = {"--oversubscribe", "--mpi", "--nnodes", "--nproc-per-node", "--rdzv-backend"}
    of_others |= {
        "--rdzv-endpoint",
        "--nodes",
        "--gpus",
        "--nr",
        "--mca",
        "--no-binary",
        "--seconds",
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README + GUIDE))
    assert named - known - of_others == set()


def test_every_file_named_is_there():
    for text, folder in ((README, ROOT), (GUIDE, ROOT / "ddp_from_scratch")):
        for name in re.findall(r"`([\w/]+\.py)[`,]", text):
            if name not in ("example.py", "run.py"):
                places = (folder, ROOT / "tests", ROOT)
                assert any(any(place.rglob(name)) for place in places), name
    for target in re.findall(r"\]\(([\w/.-]+)", README):
        assert (ROOT / Path(target)).exists(), target


def test_every_test_named_is_there():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", GUIDE)
    assert named
    for file, test in named:
        (found,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in found.read_text(), f"{file}::{test}"
