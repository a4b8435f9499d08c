"""What the package promises to the outside, and that its folders stay apart: CONTRIBUTING.md."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.options.launch_order import active_reducers, remove
from tests.support.on_ranks import on
from tests.support.sources import MODULES, PACKAGE, nodes
from tools.trace_gradient import trace

OUTSIDE = {"run", "tests", "benchmarks", "tools", "conftest", "ranks"}

# The folders from the bottom up, and for each the folders below that it may import.
ROOMS = {
    room: set(below.split())
    for room, below in {
        "common": "",
        "backend": "common",
        "launch": "common",
        "core": "backend common",
        "mpi": "backend common launch",
        "node": "backend common",
        "sync": "common core",
        "options": "backend common core sync",
        "virtual_ranks": "common core options sync",
        "watch": "backend common core options",
        "reducer": "common core node options sync virtual_ranks watch",
        "optim": "backend common core options reducer sync",
        "torch_ddp": "common core options reducer sync",
        "world": "backend common launch mpi node reducer",
        "training": "",
        "bench": "common core launch node optim reducer sync training watch world",
    }.items()
}

PUBLIC = [
    *("SGD", "Adam", "AdamW", "CommunicationError", "DistributedDataParallel", "JoinableReducer"),
    *(
        "Muon",
        "PeerError",
        "Reducer",
        "StopSignal",
        "StragglerReport",
        "SyncBatchNorm",
        "UsageError",
    ),
    *("World", "WrongResultError"),
    *("broadcast_buffers", "broadcast_optimizer_state", "broadcast_parameters", "broadcast_state"),
    *("check_ranks", "check_sync", "comm_hooks"),
    *("convert_sync_batchnorm", "elastic", "environment_without_rank", "is_communication_error"),
    *("join", "launcher", "power_sgd", "process_group", "start_mpirun", "start_ranks"),
    *("timeline", "wait"),
]


def test_public_names_are_these_and_have_docstrings():
    assert ddp.__all__ == PUBLIC
    assert (PACKAGE / "py.typed").exists()
    documented = {name: getattr(ddp, name) for name in PUBLIC}
    classes = "Reducer DistributedDataParallel JoinableReducer Muon SGD StopSignal SyncBatchNorm"
    for name in classes.split():
        methods = vars(documented[name]).items()
        documented |= {f"{name}.{m}": value for m, value in methods if not m.startswith("_")}
    assert [name for name, value in documented.items() if not inspect.getdoc(value)] == []


def test_the_names_of_a_reducer_are_those_in_the_reference(alone):
    text = (PACKAGE.parent / "docs/reference.md").read_text().partition("## Names of a Reducer")[2]
    cells = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)[(`]", cell)}
    assert {n for n in dir(ddp.Reducer(nn.Linear(1, 1))) if not n.startswith("_")} == documented


@cache
def imported(path: Path) -> set[str]:
    """The full names of the modules, and of what is taken from them, that a file imports."""
    package = ["ddp_from_scratch", *path.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def rooms(path: Path) -> set[str]:
    split = [name.split(".") for name in imported(path)]
    inside = {parts[1] for parts in split if parts[0] == "ddp_from_scratch" and len(parts) > 1}
    return inside & {path.stem for path in PACKAGE.iterdir()}


def test_imports_point_down_and_never_outside():
    # Imports are read in every form: here is what `__init__.py` and a module in a folder import.
    assert {"sync", "reducer", "world"} <= rooms(PACKAGE / "__init__.py")
    assert {"backend", "common"} <= rooms(PACKAGE / "backend" / "mpi_group.py")
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert set(ROOMS) == there - {"__init__", "__main__", "__pycache__"}
    found = {
        room: set().union(*(rooms(path) for path in MODULES if room_of(path) == room)) - {room}
        for room in ROOMS
    }
    assert found == ROOMS
    order = list(ROOMS)
    upward = {room: below - set(order[: order.index(room)]) for room, below in ROOMS.items()}
    assert not any(upward.values()), upward
    imports = {path: imported(path) for path in MODULES}
    packages = {path: {name.split(".")[0] for name in names} for path, names in imports.items()}
    assert [path for path, names in packages.items() if names & OUTSIDE] == []
    of_cuda = [path for path in MODULES if "torch.cuda" in path.read_text()]
    assert [path.stem for path in of_cuda] == ["gpu"]
    mpi = ("mpi4py", "ddp_from_scratch.backend.mpi_")
    of_mpi = [path for path, names in imports.items() if any(n.startswith(mpi) for n in names)]
    assert {path.stem.split("_")[0] for path in of_mpi if room_of(path) == "backend"} == {"mpi"}


def test_the_trainer_imports_only_public_names_of_the_library():
    prefix, found = "ddp_from_scratch.", set()
    for path in (path for path in MODULES if room_of(path) == "training"):
        found |= {name.removeprefix(prefix) for name in imported(path) if name.startswith(prefix)}
    assert {name for name in found if name.split(".")[0] != "training"} <= set(PUBLIC)


def test_code_above_the_backend_asks_a_group_for_its_traits_and_not_for_its_class():
    named = [path for path in MODULES if "SharedMemoryGroup" in path.read_text()]
    assert {room_of(path) for path in named} == {"backend", "node"}


def test_one_text_lists_every_place_that_divides_gradients():
    text, places = (PACKAGE / "core/comm_hooks.py").read_text(), set()
    for path in MODULES:
        lines = path.read_text().splitlines()
        places |= {path for line in lines if "A division: see" in line}
        if room_of(path) in ("core", "options", "optim", "virtual_ranks", "torch_ddp", "reducer"):
            places |= {path for line in lines if re.search(r"/ dist\.get_world_size|AVG,", line)}
    listed = {PACKAGE / name for name in re.findall(r"\((\w+/\w+\.py)\)", text.split('"""')[1])}
    assert listed | {PACKAGE / "core/comm_hooks.py"} == places


def test_the_layers_in_the_guide_have_every_room_above_what_it_imports():
    layers = (PACKAGE.parent / "docs/how-it-works.md").read_text().partition("## Layers")[2]
    lines = re.findall(r"^\| (`.*?) \|", layers.partition("\n## ")[0], re.MULTILINE)
    floor = {
        room: number for number, line in enumerate(lines) for room in re.findall(r"`(\w+)`", line)
    }
    assert floor.keys() == ROOMS.keys()
    assert not [(a, b) for a, below in ROOMS.items() for b in below if floor[b] <= floor[a]]


def test_no_import_goes_round_in_a_circle():
    """Between modules, those of one folder too; the packages' `__init__.py` aside."""
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


def test_files_are_short_and_folders_are_few():
    assert [path for path in MODULES if path.read_text().count("\n") > 600] == []
    assert (len(ROOMS), sum(map(len, ROOMS.values()))) == (16, 57)  # folders, arrows


@on("gloo-2")
def test_a_step_takes_as_few_calls_as_it_did(world):
    """Four layers in four buckets. The backend's calls have a budget in its own room."""
    for leftover in active_reducers():  # of other tests on these ranks
        remove(leftover)
    for called, most in zip(trace(), (231, 61, 143), strict=True):
        # The second is there if another test on these ranks has used shard="node".
        others = ("backend/", "optim/shared_parameters.py")
        above = {place: n for place, n in called.items() if not place[0].startswith(others)}
        assert sum(above.values()) <= most, above
