"""`torch.set_default_dtype` and `set_default_device` change nothing that the library computes."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch.optim.unflattened import Unflattened
from ddp_from_scratch.optim.update_rules import ADAM_RULE
from ddp_from_scratch.options.power_sgd import PowerSGDState, power_sgd_hook
from tests.support.sources import MODULES, PACKAGE, nodes

MAKERS = {"tensor", "zeros", "ones", "empty", "empty_strided", "full", "arange", "linspace"} | {
    *("rand", "randn", "scalar_tensor", "eye")
}
PROGRAMS = {PACKAGE / "bench", PACKAGE / "training"}  # their processes are their own


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.unit
def test_the_library_names_dtype_and_device_of_every_tensor_that_it_makes():
    found = []
    for module in MODULES:
        for node in nodes(module):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "torch"
                and node.func.attr in MAKERS
                and not PROGRAMS.intersection(module.parents)
                and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
            ):
                found.append(f"{module.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_step_counts_do_not_stop_at_256(dtype):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    group = torch.optim.AdamW([parameter]).param_groups[0]
    with defaults(dtype, "meta"):
        rows: list[dict[torch.Tensor, Any]] = [{parameter: {}}, {parameter: {}}]
        together = Unflattened([parameter], 0, ADAM_RULE, ())
        for _ in range(300):
            ADAM_RULE.step(parameter, parameter.grad, rows[0][parameter], group)
            together.step(rows[1], group)
    for states in rows:
        assert states[parameter]["step"] == 300
        assert states[parameter]["step"].dtype is torch.float32


def trained(world, shard: str, optimizer: str, hook: str, steps: int) -> dict[str, Any]:
    """A model, its gradients and its optimizer's state, after some steps."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(
            nn.Linear(16, 20, dtype=torch.float32),
            nn.BatchNorm1d(20, dtype=torch.float32),
            nn.Linear(20, 4, dtype=torch.float32),
        )
        x = torch.linspace(world.rank, 3, 64, dtype=torch.float32).view(4, 16).sin()
    model = ddp.convert_sync_batchnorm(model)
    shared_memory = hook != "power_sgd"  # which would average in full
    reducer = ddp.Reducer(
        model, check_every=3, check_finite=True, sync_buffers=True, shared_memory=shared_memory
    )
    if hook == "power_sgd":
        state = PowerSGDState(1, 2)
        reducer.register_comm_hook(state, power_sgd_hook)
    kind: Any = getattr(ddp, optimizer)
    options = {} if optimizer == "Muon" else {"shard": shard}
    parameters: Any = model.parameters()
    if optimizer == "Muon":
        parameters = [
            {"params": [p for p in parameters if p.dim() == 2]},
            {"params": [p for p in model.parameters() if p.dim() != 2], "use_muon": False},
        ]
    stepped = kind(parameters, lr=0.01, reducer=reducer, **options)
    for step in range(steps):
        stepped.zero_grad()
        model(x).square().mean().backward()
        stepped.step()
        if step == 2:
            stepped.load_state_dict(stepped.state_dict())
    ddp.check_sync(model)
    states = stepped.state_dict()["state"]
    reducer.remove()
    return {
        **{name: value.detach().clone() for name, value in model.state_dict().items()},
        **{f"{k}.{name}": value for k, held in states.items() for name, value in held.items()},
    }


def bits_without_and_with(world, *arguments) -> None:
    plain = trained(world, *arguments)
    with defaults(torch.bfloat16, "meta"):
        found = trained(world, *arguments)
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        assert found[name].dtype is value.dtype, name
        assert found[name].device == value.device, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("shard", "optimizer", "hook"),
    [
        ("none", "AdamW", ""),
        ("world", "Adam", ""),
        ("node", "SGD", ""),
        ("none", "Muon", ""),
        ("none", "SGD", "power_sgd"),
    ],
)
def test_defaults_do_not_change_the_bits_of_a_training(ranks, shard, optimizer, hook):
    ranks("gloo", 2)(bits_without_and_with, shard, optimizer, hook, 5)
