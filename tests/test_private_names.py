"""Private names of torch and Python that the library imports: this version has them all."""

import argparse
import ast
import atexit
import threading
from pathlib import Path

import torch
import torch.distributed.tensor.parallel.ddp

import ddp_from_scratch

PACKAGE = Path(ddp_from_scratch.__file__).parent

# Used where torch has them.
SINCE = {
    "torch._C._distributed_c10d.FlightRecorderHook.attach": "2.15",
    "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS": "2.15",
}


def imports(tree):
    """The modules and names of other packages in a file, as paths, by what the file calls them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                name = item.asname or item.name.partition(".")[0]
                found[name] = item.name if item.asname else name
        elif isinstance(node, ast.ImportFrom):
            found |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
    return {name: path for name, path in found.items() if not path.startswith("ddp_from_scratch")}


def path_of(node, imported):
    """An expression such as `dist.ProcessGroup.rank` as a path; None if it is no import's."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute) and (start := path_of(node.value, imported)):
        return f"{start}.{node.attr}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        of, name = node.args[:2]
        if isinstance(name, ast.Constant) and (start := path_of(of, imported)):
            return f"{start}.{name.value}"
    return None


def used():
    paths = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        imported = imports(tree)
        paths |= {*imported.values(), *(path_of(node, imported) for node in ast.walk(tree))}
    return paths - {None, "os._exit"}  # which is documented


def test_this_torch_has_them_all():
    private = {path for path in used() if "._" in path.replace(".__", "")}
    assert len(private) > 20
    scope = {"argparse": argparse, "atexit": atexit, "threading": threading, "torch": torch}
    lost = []
    for name in private:
        try:
            eval(name, scope)
        except AttributeError:
            lost += [name] if torch.__version__ >= SINCE.get(name, "") else []
    assert lost == [], f"torch {torch.__version__} has lost them"
