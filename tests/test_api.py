"""What the package promises to the outside, and that its rooms stay apart (DESIGN.md, Rooms)."""

import ast
import inspect
from pathlib import Path

import pytest

import ddp_from_scratch

PACKAGE = Path(ddp_from_scratch.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = {"run", "tests", "benchmarks", "tools", "conftest", "ranks"}

# What each module of the chain may import of the package: only what is below it.
CHAIN = {
    "layout": set(),
    "group": set(),
    "memory": {"group"},
    "packing": {"layout", "memory"},
    "bucket": {"layout", "memory", "packing"},
    "comm_hooks": {"layout", "bucket", "group"},
    "snapshot": set(),
    "flat_run": {"bucket", "memory"},
    "sgd": {"bucket", "flat_run", "memory", "reducer"},
    "node_shared": {"bucket", "check_sync", "flat_run", "memory", "reducer", "sgd"},
    "forward_writes": set(),
    "sync_batch_norm": set(),
    "share": set(),
    "sending": {"bucket", "comm_hooks", "group", "share"},
    "static_graph": set(),
    "unused_parameters": set(),
    "usage": {"static_graph"},
    "sparse": {"bucket", "layout"},
    "buckets": {"bucket", "layout", "memory", "sparse"},
    "cap_search": {"bucket", "buckets", "comm_hooks", "layout"},
    "backward_pass": set(),
    "hooks": set(),
    "guard": {"backward_pass", "bucket", "buckets", "share", "snapshot", "usage"},
    "checksum": set(),
    "ready_order": set(),
    "stall": {"buckets"},
    "check_sync": {"checksum", "group"},
    "reducer": {"layout", "bucket", "buckets", "sending", "snapshot", "share", "usage", "guard"}
    | {"forward_writes"}
    | {"backward_pass", "hooks", "unused_parameters", "check_sync", "stall", "ready_order"}
    | {"cap_search", "buffer_sync", "group"},
    "power_sgd": {"bucket", "comm_hooks", "group"},
    "delayed": {"buckets", "comm_hooks"},
    "inputs": set(),
    "arguments": {"sparse", "group"},
    "mixed_precision": {"bucket", "comm_hooks", "inputs", "sparse"},
    "broadcast": {"layout", "sparse", "group"},
    "buffer_sync": {"broadcast", "group"},
    "torch_internals": {"bucket", "buffer_sync", "comm_hooks", "delayed", "group", "reducer"},
    "name_alone": set(),
    "logging_data": {"buckets", "comm_hooks", "reducer"},
    "join": {"broadcast", "hooks", "reducer", "share"},
    "distributed_data_parallel": {"arguments", "broadcast", "bucket", "buffer_sync", "delayed"}
    | {"inputs", "join", "layout", "logging_data", "mixed_precision", "name_alone", "reducer"}
    | {"torch_internals"},
}


def test_public_names():
    assert ddp_from_scratch.__all__ == [
        "SGD",
        "DistributedDataParallel",
        "JoinableReducer",
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
        "join",
        "power_sgd",
        "process_group",
        "start_ranks",
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


def test_imports_are_read_in_every_form():
    """Guards the tests below: here is what `__init__.py` and a module in a folder import."""
    assert {"broadcast", "reducer", "process_group"} <= rooms(PACKAGE / "__init__.py")
    assert {"launch", "errors"} <= rooms(PACKAGE / "mpi" / "runtime.py")


@pytest.mark.parametrize("module", CHAIN)
def test_imports_of_the_chain_point_down(module):
    assert rooms(PACKAGE / f"{module}.py") <= CHAIN[module]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_imports_nothing_that_uses_it(path):
    assert not {name.split(".")[0] for name in imported(path)} & OUTSIDE


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_training_imports_training(path):
    if "training" not in path.relative_to(PACKAGE).parts:
        assert "training" not in rooms(path)


def test_imports_are_acyclic():
    """Between the modules and folders at the package's top, `__init__.py` aside."""
    graph = {path.stem: rooms(path) - {path.stem} for path in PACKAGE.glob("[a-z]*.py")}
    for folder in (path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()):
        inside = [rooms(path) for path in folder.rglob("*.py")]
        graph[folder.name] = set().union(*inside) - {folder.name}
    while graph:
        leaves = {module for module, below in graph.items() if not below & graph.keys()}
        assert leaves, f"imports go round in a circle among {sorted(graph)}"
        graph = {module: below for module, below in graph.items() if module not in leaves}
