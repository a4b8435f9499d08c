"""Private names of torch and Python that the library uses: this version has all of them."""

import argparse
import ast
import atexit
import re
import sys
import threading
from functools import cache

import torch
import torch.distributed.tensor.parallel.ddp

from tests.support.sources import MODULES, PACKAGE, nodes

# Of objects: expressions that this version evaluates, as long as it has the name.
ATTRIBUTES = [
    *("argparse.ArgumentParser()._option_string_actions", "ignoring.weight._ddp_ignored"),
    "ignoring._ddp_params_and_buffers_to_ignore",
    *(f"torch.Tensor.{name}" for name in ("_backward_hooks", "_nnz", "_use_count")),
    "torch.autograd.profiler.record_function._call_end_callbacks_on_future",
    *(
        f"torch.distributed.ProcessGroup.{name}"
        for name in (
            "_get_sequence_number_for_group",
            "_register_backend",
            "_set_default_backend",
        )
    ),
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    *("torch.nn.Module()._load_state_dict_pre_hooks", "torch.nn.Module()._modules"),
    "torch.nn.Module()._compiled_call_impl",
]

# Used where torch has them.
SINCE = {"torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS": "2.15"}


def is_private(path):
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def imports(module):
    """The modules and names of other packages in a file, as paths, by what the file calls them."""
    found = {}
    for node in nodes(module):
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
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        of, name = node.args[:2]
        if isinstance(name, ast.Constant) and (start := path_of(of, imported)):
            return f"{start}.{name.value}"
    return None


def defined(module):
    """Names that a file gives to functions, classes, variables and attributes of its own."""
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if getattr(node.value, "id", None) == "self" else []


@cache
def used():
    """The paths below imports, and the attributes of anything else, that are private."""
    paths, attributes = set(), set()
    for module in MODULES:
        imported = imports(module)
        paths.update(imported.values())
        for node in nodes(module):
            if path := path_of(node, imported):
                paths.add(path)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
    ours = {name for module in MODULES for name in defined(module)}
    ours |= {"_asdict", "_replace", "os._exit"}  # of a named tuple; documented
    return [{name for name in found - ours if is_private(name)} for found in (paths, attributes)]


def test_this_torch_has_them_all():
    paths, attributes = used()
    assert attributes == {expression.rpartition(".")[2] for expression in ATTRIBUTES}
    ignoring = torch.nn.Linear(1, 1)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        ignoring, ["weight"]
    )
    scope = {"argparse": argparse, "atexit": atexit, "ignoring": ignoring}
    scope |= {"sys": sys, "threading": threading, "torch": torch}
    lost = []
    for name in [*paths, *ATTRIBUTES]:
        try:
            eval(name, scope)
        except AttributeError:
            lost += [name] if torch.__version__ >= SINCE.get(name, "") else []
    assert lost == [], f"torch {torch.__version__} has lost them"


def test_the_page_lists_them():
    paths, attributes = used()
    whole = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
    page = (PACKAGE.parent / "docs" / "private-names.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted({path.rpartition(".")[2] for path in whole} | attributes)
