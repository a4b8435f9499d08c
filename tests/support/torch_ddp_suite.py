"""torch's own tests of DistributedDataParallel, from the wheel, on the ranks of one crew.

    torch_test(world, "test_ddp_control_flow_same_across_ranks", ours=True)

runs one in the process group that is open, with our class in place of torch's or with torch's own.
Most ask for GPUs although what they test needs none: `on_cpu` lets them have the CPU instead.
"""

import ast
import importlib.util
import os
import re
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import ddp_from_scratch as ddp

MODULE = "torch.testing._internal.distributed.distributed_test"


class _CPUInstead(TorchFunctionMode):
    """Whoever names a GPU, by number or by name, gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and _names_gpu(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _names_gpu(value) else value for value in args)
        return func(*args, **kwargs)


def _names_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return type(value) is int


def _constructor(class_: type, **ours: Any) -> Callable[..., None]:
    """The class's own, for modules that are on the CPU whatever `device_ids` says."""
    original = class_.__init__

    def construct(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        if device_ids is not None and len(device_ids) > 1:
            options["device_ids"] = device_ids
        original(self, module, **{**ours, **options})

    return construct


@contextmanager
def on_cpu(world_size: int) -> Iterator[None]:
    with ExitStack() as stack:
        for target, name, value in (
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "device_count", lambda: world_size),
            (torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu")),
            (torch.accelerator, "set_device_index", lambda *_: None),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "set_device", lambda *_: None),
            (torch.cuda, "device_count", lambda: world_size),
            (torch.cuda, "synchronize", lambda *_, **__: None),
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(_CPUInstead())
        yield


def load() -> Any:
    if MODULE not in sys.modules:
        os.environ.setdefault("BACKEND", "gloo")
        os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
        os.environ.setdefault("TEMP_DIR", "/tmp")
        __import__(MODULE)
    return sys.modules[MODULE]


def names() -> list[str]:
    """The tests that are about DistributedDataParallel, found without importing the module."""
    found: Any = importlib.util.find_spec(MODULE)
    source = Path(found.origin).read_text()
    lines = source.splitlines()
    nodes = ast.walk(ast.parse(source))
    base: Any = next(node for node in nodes if getattr(node, "name", "") == "_DistTestBase")
    kinds = "ddp|DDP|hook|buffer|different|static|ignore|verify|undefined|uneven|param"
    helpers = re.compile(rf"DistributedDataParallel|self\._\w*({kinds})")

    def is_ours(test: ast.FunctionDef) -> bool:
        first = min(node.lineno for node in (test, *test.decorator_list))
        text = "\n".join(lines[first - 1 : test.end_lineno])
        return "ddp" in test.name.lower() or bool(helpers.search(text))

    tests = [node for node in base.body if isinstance(node, ast.FunctionDef)]
    return sorted({t.name for t in tests if t.name.startswith("test_") and is_ours(t)})


def suite_of(module: Any, barrier: Callable[[], object]) -> Any:
    """torch's test-case with ranks that are there already, rather than started for each test."""

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None: ...

        def tearDown(self) -> None: ...

        def _barrier(self, wait_for: int | None = None, timeout: int = 10) -> None:
            # torch's polls files ten times a second. All ranks are waited for, in every test.
            barrier()

    return Suite


def outcome(case: Any, name: str) -> tuple[str, str]:
    """Runs a test: "pass", "skip" or "fail", and why."""
    skips = sys.modules["torch.testing._internal.common_distributed"].TEST_SKIPS
    messages = {skip.exit_code: skip.message for skip in skips.values()}
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return "skip", str(skip)
    except SystemExit as skip:  # torch's way to say so from a rank
        return "skip", messages.get(skip.code, f"exit code {skip.code}")
    except BaseException:  # noqa: BLE001  # whatever a test raises
        return "fail", traceback.format_exc()
    return "pass", ""


def torch_test(world: Any, name: str, ours: bool, **options: Any) -> tuple[str, str]:
    """The outcome of a test on this rank, modules with `options`."""
    suite = load()
    class_ = ddp.DistributedDataParallel if ours else torch.nn.parallel.DistributedDataParallel

    class Case(suite_of(suite, dist.barrier)):  # type: ignore[misc]
        def _run_uneven_inputs_test(self, test_case: Any, *arguments: Any, **options: Any) -> None:
            # Peers would wait for 10 steps of 12 s: longer than any collective of ours may.
            if isinstance(test_case.inp, torch.Tensor) and test_case.inp.dim() == 4:
                test_case = test_case._replace(inp=test_case.inp[..., :20, :20])
            super()._run_uneven_inputs_test(test_case, *arguments, **options)

    case = Case(name)
    case.rank, case.file_name = world.rank, ""
    level = dist.get_debug_level()
    with (
        on_cpu(world.world_size),
        patch.object(class_, "__init__", _constructor(class_, **options)),
        patch.object(torch.nn.parallel, "DistributedDataParallel", class_),
        patch.object(suite, "DistributedDataParallel", class_),
        patch.object(suite, "HAS_TORCHVISION", False),  # ResNet-50 on such images
    ):
        torch.manual_seed(0)
        found = outcome(case, name)
    dist.set_debug_level(level)
    return found
