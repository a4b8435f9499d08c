"""Reads of parameters that are on their way, without ranks: what waits for what."""

import copy
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_from_scratch.optim.forward_waits import ForwardWaits


def linear(**attributes):
    model = nn.Linear(2, 2)
    vars(model).update(attributes)
    return model


def waits_of(module):
    """Returns the object that waits, and what it is asked to wait for; None stands for all."""
    waited = []
    return ForwardWaits(module, waited.append, {"one": "arriving"}), waited


TABLE = {
    "dict": dict,
    "unpacked": lambda table: {**table},
    "to a function": lambda table: (lambda **named: named)(**table),
    "updated": lambda table: {}.update(table),
    "copy": lambda table: table.copy(),
    "copied": copy.copy,
    "or": lambda table: table | {},
    "other or": lambda table: {} | table,
    "in place": lambda table: (lambda other: other.__ior__(table))({}),
    "setdefault": lambda table: table.setdefault("weight"),
    "pop": lambda table: table.pop("weight"),
    "pop or": lambda table: table.pop("weight", None),
    "popitem": lambda table: table.popitem(),
    "get": lambda table: table.get("weight"),
    "values": lambda table: table.values(),
    "items": lambda table: table.items(),
    "repr": repr,
}


@pytest.mark.parametrize("way", TABLE)
def test_every_read_of_a_table_waits(way):
    model = nn.Linear(2, 2)
    model.bias = None
    weight = model.weight
    table = dict(model._parameters)
    expected = TABLE[way]({"bias": None, "weight": weight})
    model._parameters = {"bias": None, "weight": weight}
    waits, waited = waits_of(model)
    found = TABLE[way](model._parameters)
    assert any(any(one is weight for one in each) for each in waited)
    assert str(found) == str(expected)
    assert table["weight"] is weight
    assert waits


def test_names_are_read_without_a_wait():
    model = nn.Linear(2, 2)
    waits, waited = waits_of(model)
    table = model._parameters
    assert [*table] == [*table.keys()] == ["weight", "bias"]
    assert "weight" in table
    assert table.pop("none", 3) == 3
    with pytest.raises(KeyError, match="none"):
        table.pop("none")
    table.clear()
    with pytest.raises(KeyError, match="empty"):
        table.popitem()
    assert waited == []
    assert waits


@dataclass
class Held:
    weight: torch.Tensor


def closure(weight):
    return lambda x: x @ weight


DEFAULT = torch.ones(2)


def by_default(x, weight=DEFAULT):
    return x @ weight


SEEN = {
    "list": lambda w: [w],
    "deep": lambda w: {"a": [(w,)]},
    "key": lambda w: {w: 1},
    "set": lambda w: {w},
    "deque": lambda w: deque([w]),
    "closure": closure,
    "method": lambda w: w.add,
}
UNSEEN = {
    "dataclass": Held,
    "namespace": lambda w: SimpleNamespace(weight=w),
    "in a list": lambda w: [SimpleNamespace(weight=w)],
    "partial": lambda w: partial(torch.add, w),
    "iterator": lambda w: iter([w]),
    "too deep": lambda w: [[[[[[w]]]]]],
}
PLAIN = (
    1,
    2.0,
    "three",
    None,
    True,
    torch.float32,
    torch.Size([2]),
    nn.ReLU(),
    [nn.ReLU()],
    nn.ReLU,
)
PLAIN += (nn.functional.relu, torch.nn.functional.gelu, torch, nn.ReLU().forward, {"a": (1, "b")})


@pytest.mark.parametrize("kind", [*SEEN, *UNSEEN])
def test_a_forward_pass_waits_for_what_its_module_keeps(kind):
    weight = nn.Parameter(torch.ones(2, 2))
    model = linear(kept=(SEEN | UNSEEN)[kind](weight))
    waits, waited = waits_of(model)
    waits.before_forward(model)
    assert len(waited) == 1
    if kind in UNSEEN:
        assert waited == [None]
    else:
        assert waited[0][0] is weight
        assert len(waited[0]) == 1


def test_a_forward_pass_waits_for_nothing_else():
    parts = nn.ModuleList([nn.Conv2d(2, 2, 2), nn.BatchNorm1d(2), nn.TransformerEncoderLayer(8, 2)])
    for module in [linear(kept=[*PLAIN]), *(linear(kept=one) for one in PLAIN), *parts.modules()]:
        waits, waited = waits_of(module)
        waits.before_forward(module)
        assert waited == [], type(module)
    model = linear(kept=by_default)
    waits, waited = waits_of(model)
    waits.before_forward(model)
    assert len(waited) == 1
    assert waited[0][0] is DEFAULT
