"""Private names of torch and Python that the library uses, and those that a version has lost."""

import argparse
import ast
import atexit
import threading
from pathlib import Path

import torch
import torch.distributed.tensor.parallel.ddp

import ddp_from_scratch

PACKAGE = Path(ddp_from_scratch.__file__).parent

# Expressions that a version of torch or Python evaluates, as long as it has the name.
NAMES = {
    f"{start}.{end}"
    for start, ends in {
        "argparse.ArgumentParser()": "_option_string_actions",
        "atexit": "_run_exitfuncs",
        "ignoring": "_ddp_params_and_buffers_to_ignore weight._ddp_ignored",
        "threading": "_shutdown",
        "torch": "_debug_has_internal_overlap _foreach_add_ _foreach_copy_ _fused_adam_ "
        "_fused_adamw_ _fused_sgd_",
        "torch.Tensor": "_backward_hooks _nnz _use_count",
        "torch._C": "DispatchKey.Functionalize DispatchKeySet.raw_repr Future "
        "_TorchDispatchModeKey.PROXY _current_graph_task_id _dispatch_keys "
        "_distributed_c10d.Backend.Options._timeout _functions.AccumulateGrad "
        "_functorch.peek_interpreter_stack _get_dispatch_mode _len_torch_dispatch_stack "
        "_set_grad_enabled _will_engine_execute_node",
        "torch.autograd": "Variable._execution_engine.queue_callback "
        "_unsafe_preserve_version_counter profiler._is_profiler_enabled "
        "profiler.record_function._call_end_callbacks_on_future",
        "torch.cuda": "_is_in_bad_fork",
        "torch.distributed.ProcessGroup": "_device_types _get_backend _register_backend "
        "_set_default_backend _set_group_desc _set_group_name",
        "torch.distributed": "device_mesh.DeviceMesh._get_root_mesh "
        "tensor.parallel.ddp._pre_dp_module_transform",
        "torch.distributed.distributed_c10d": "_MPI_AVAILABLE _get_default_group "
        "_get_default_store _get_process_group_store _world.pg_map",
        "torch.nn.Module()": "_load_state_dict_pre_hooks _modules",
        "torch.nn.modules.batchnorm": "_BatchNorm _NormBase",
    }.items()
    for end in ends.split()
}

# Used where torch has them.
SINCE = {
    "torch._C._distributed_c10d.FlightRecorderHook.attach": "2.15",
    "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS": "2.15",
}


def is_private(path):
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


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


def defined(tree):
    """Names that a file gives to functions, classes, variables and attributes of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def used():
    """Paths below imports, and private attributes of anything else but the library's."""
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    paths, attributes = set(), set()
    for tree in trees:
        imported = imports(tree)
        paths |= set(imported.values())
        for node in ast.walk(tree):
            if path := path_of(node, imported):
                paths.add(path)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
    attributes -= {name for tree in trees for name in defined(tree)}
    paths -= {"os._exit"}  # documented
    return paths, set(filter(is_private, attributes))


def test_every_private_name_is_in_the_list():
    paths, attributes = used()
    paths = set(filter(is_private, paths))
    known = NAMES | set(SINCE)
    starts = {
        name[:end] for name in known for end in range(len(name) + 1) if name[end:][:1] in ".("
    }
    last = {name.rpartition(".")[2] for name in known}
    assert sorted(paths - known - starts) == []
    assert sorted(attributes - last) == []
    source = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    assert [name for name in last if name not in source] == []


def test_this_torch_has_them_all():
    ignoring = torch.nn.Linear(1, 1)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        ignoring, ["weight"]
    )
    wanted = NAMES | {name for name, since in SINCE.items() if torch.__version__ >= since}
    scope = {
        "argparse": argparse,
        "atexit": atexit,
        "ignoring": ignoring,
        "threading": threading,
        "torch": torch,
    }
    lost = []
    for name in sorted(wanted):
        try:
            eval(name, scope)
        except AttributeError:
            lost.append(name)
    assert lost == [], f"torch {torch.__version__} has lost them"
