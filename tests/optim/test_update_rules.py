"""The arithmetic of one step beside torch's optimizers, for every size and cut."""

import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

from ddp_from_scratch.optim.update_rules import (
    ADAM_RULE,
    CACHE_LINE,
    SGD_RULE,
    fused_kernel_is_exact,
)
from tests.support.terms import torchs
from tests.support.tiers import slow

SIZES = [*range(1, 40), 63, 64, 65, 1023, 4097, 100_003]


# Of both classes, with every setting on and off that changes what is computed.
SGD = [
    {"momentum": m, "dampening": d, "weight_decay": w, "nesterov": n, "maximize": x}
    for m, d, w, n, x in product((0, 0.9), (0, 0.3), (0, 0.01), (False, True), (False, True))
    if (m or not d) and not (n and (d or not m))
]
ADAM = [
    {"weight_decay": w, "amsgrad": a, "maximize": x}
    for w, a, x in product((0.0, 0.01), (False, True), (False, True))
]
KINDS = {"SGD": (SGD_RULE, SGD), "Adam": (ADAM_RULE, ADAM), "AdamW": (ADAM_RULE, ADAM)}


def check_steps(kind: str, settings: dict[str, Any], dtype: torch.dtype, cut: bool) -> None:
    """Two steps of parameters of every size, whole or cut at a cache line, beside torch's."""
    rule = KINDS[kind][0]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in SIZES]
    optimizer = torchs(kind)(parameters, lr=0.03, **settings)
    group = optimizer.param_groups[0]
    names = [name for name in rule.state_names(group) if name != "step"]
    ours = [parameter.detach().clone() for parameter in parameters]
    states = [[torch.zeros_like(values) for _ in names] for values in ours]
    line = CACHE_LINE // dtype.itemsize
    for num_steps in range(2):
        for parameter, values, state in zip(parameters, ours, states, strict=True):
            size = len(values)
            parameter.grad = torch.randn(size, dtype=dtype)
            middle = size // 2 // line * line if cut else 0
            for part in (slice(middle), slice(middle, None)):
                columns = [[t[part]] for t in (values, parameter.grad, *state)]
                if columns[0][0].numel():
                    rule.update_flat(columns, num_steps, group)
        optimizer.step()
        for parameter, values, state in zip(parameters, ours, states, strict=True):
            where = f"{kind} {settings}, {len(values)} of {dtype}, step {num_steps}"
            assert values.equal(parameter.detach()), where
            for name, value in zip(names, state, strict=True):
                assert value.equal(optimizer.state[parameter][name]), f"{name}: {where}"


@pytest.mark.parametrize(
    ("dtype", "threads"), [(torch.float32, 1), slow(torch.float64, 1), slow(torch.float32, 3)]
)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_torch_for_every_size(kind, cut, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for settings in KINDS[kind][1]:
            check_steps(kind, settings, dtype, cut)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_are_those_of_torch_whatever_the_vectors(capability):
    """In a process of its own: torch chooses its kernels once."""
    again = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "for_every_size"]
    environ = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(again, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_kernel_with_other_bits_is_not_used(monkeypatch):
    original = torch._fused_sgd_

    def other(parameters: list[torch.Tensor], *arguments: Any, **settings: Any) -> None:
        original(parameters, *arguments, **settings)
        parameters[0].mul_(1 + 1e-6)

    monkeypatch.setattr(torch, "_fused_sgd_", other)
    fused_kernel_is_exact.cache_clear()
    try:
        check_steps("SGD", SGD[-1], torch.float32, cut=False)
        assert not fused_kernel_is_exact(torch.float32, "cpu")
    finally:
        fused_kernel_is_exact.cache_clear()
    monkeypatch.undo()
    assert fused_kernel_is_exact(torch.float32, "cpu")
    assert not fused_kernel_is_exact(torch.complex64, "cpu")
    assert not fused_kernel_is_exact(torch.float32, "meta")


@pytest.mark.parametrize("layout", ["transposed", "with holes"])
def test_adam_steps_a_parameter_whatever_its_strides(layout):
    torch.manual_seed(0)
    whole = torch.randn(6, 10)
    values = whole.t() if layout == "transposed" else whole[:, :7]
    gradient = torch.randn(values.shape)
    parameter = torch.nn.Parameter(values.clone(memory_format=torch.contiguous_format))
    parameter.grad = gradient.clone()
    optimizer = torchs("AdamW")([parameter])
    state: dict[str, Any] = {}
    for _ in range(2):
        optimizer.step()
        ADAM_RULE.step(values, gradient, state, optimizer.param_groups[0])
    torch.testing.assert_close(values, parameter.detach())
    assert state["step"] == 2
