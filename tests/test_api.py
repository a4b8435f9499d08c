"""What the package promises to the outside, and that its rooms stay apart (DESIGN.md, Rooms)."""

import ast
import inspect
from pathlib import Path

import pytest

import ddp_from_scratch

PACKAGE = Path(ddp_from_scratch.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = {"run", "tests", "benchmarks", "tools", "conftest", "ranks"}

# The rooms from the bottom up, and for each the rooms below that it may import.
ROOMS = {
    "errors": set(),
    "group": set(),
    "marks": set(),
    "waiting": {"errors"},
    "launch": {"errors"},
    "node": {"errors", "group", "waiting"},
    "autograd": {"waiting"},
    "buckets": {"group"},
    "comm_hooks": {"buckets", "group", "node"},
    "sync": {"buckets", "group", "waiting"},
    "checks": {"autograd", "buckets", "group", "marks", "node", "sync"},
    "mpi": {"errors", "launch", "node"},
    "world": {"errors", "launch", "mpi"},
    "shards": {"buckets", "checks", "comm_hooks", "group", "node", "sync", "waiting"},
    "elasticity": {"errors", "group", "launch", "node", "waiting", "world"},
    "reducer": {
        *("autograd", "buckets", "checks", "comm_hooks", "group", "node", "shards", "sync"),
    },
    "optim": {"buckets", "node", "reducer", "sync"},
    "torch_ddp": {"buckets", "comm_hooks", "group", "reducer", "sync"},
    "profiling": {"autograd", "buckets", "errors", "group", "marks", "reducer"},
    "bench": {"errors", "launch", "node", "optim", "profiling", "reducer", "sync", "world"},
    "training": {
        *(
            "buckets",
            "checks",
            "comm_hooks",
            "elasticity",
            "errors",
            "group",
            "launch",
            "optim",
            "profiling",
        ),
        *("reducer", "shards", "sync", "waiting", "world"),
    },
}


def test_public_names():
    assert ddp_from_scratch.__all__ == [
        "SGD",
        "Adam",
        "AdamW",
        "DistributedDataParallel",
        "JoinableReducer",
        "NodeSharedAdam",
        "NodeSharedAdamW",
        "NodeSharedSGD",
        "Reducer",
        "SyncBatchNorm",
        "UsageError",
        "World",
        "broadcast_buffers",
        "broadcast_parameters",
        "check_sync",
        "comm_hooks",
        "convert_sync_batchnorm",
        "elastic",
        "join",
        "power_sgd",
        "process_group",
        "start_ranks",
        "timeline",
    ]


@pytest.mark.parametrize("name", ddp_from_scratch.__all__)
def test_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(ddp_from_scratch, name))


@pytest.mark.parametrize(
    "name", ["Reducer", "DistributedDataParallel", "JoinableReducer", "SGD", "SyncBatchNorm"]
)
def test_public_methods_have_docstrings(name):
    for method, value in vars(getattr(ddp_from_scratch, name)).items():
        if not method.startswith("_"):
            assert inspect.getdoc(value), method


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def imported(path: Path) -> set[str]:
    """The full names of the modules, and of what is taken from them, that a file imports."""
    package = ["ddp_from_scratch", *path.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def rooms(path: Path) -> set[str]:
    """The modules and folders at the package's top that a file imports."""
    split = [name.split(".") for name in imported(path)]
    inside = {parts[1] for parts in split if parts[0] == "ddp_from_scratch" and len(parts) > 1}
    return inside & {path.stem for path in PACKAGE.iterdir()}


def files(room: str) -> list[Path]:
    return [path for path in MODULES if path.relative_to(PACKAGE).with_suffix("").parts[0] == room]


def test_imports_are_read_in_every_form():
    """Guards the test below: here is what `__init__.py` and a module in a folder import."""
    assert {"sync", "reducer", "world"} <= rooms(PACKAGE / "__init__.py")
    assert {"launch", "errors"} <= rooms(PACKAGE / "mpi" / "runtime.py")


def test_every_room_has_its_row():
    assert set(ROOMS) == {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")} - {
        "__init__",
        "__main__",
        "__pycache__",
    }


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room):
    found = set().union(*map(rooms, files(room))) - {room}
    assert found == ROOMS[room]
    assert found <= set(list(ROOMS)[: list(ROOMS).index(room)])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_imports_nothing_that_uses_it(path):
    assert not {name.split(".")[0] for name in imported(path)} & OUTSIDE


@pytest.mark.parametrize("path", files("node"), ids=lambda path: path.name)
def test_node_knows_no_mpi(path):
    assert "mpi4py" not in {name.split(".")[0] for name in imported(path)}


def test_no_import_goes_round_in_a_circle():
    """Between modules, those of one room too; the packages' `__init__.py` aside."""
    names = {
        ".".join(["ddp_from_scratch", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in MODULES
        if path.stem != "__init__"
    }
    graph = {name: imported(path) & names.keys() for name, path in names.items()}
    while graph:
        leaves = {name for name, below in graph.items() if not below & graph.keys()}
        assert leaves, f"imports go round in a circle among {sorted(graph)}"
        graph = {name: below for name, below in graph.items() if name not in leaves}
