"""Small training programs on virtual ranks, and what one process makes of them by definition."""

import copy
import hashlib
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from ddp_from_scratch.common.random import seeded
from tests.support.machines import group_over
from tests.support.terms import as_large

VIRTUAL_RANKS = 8
STEPS = 4
CLASSES = 5


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()),
        *(nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES)),
    )


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = cnn()
        self.first, self.second = layers[:4], layers[4:]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.clone().requires_grad_()
        return self.second(checkpoint(self.first, images, use_reentrant=True))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))
        self.layers = cnn()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.add_(images.mean().abs())
        hidden = self.layers[0](images) * self.seen
        return self.layers[1:](hidden) + random.random() + np.random.rand()


class Branches(nn.Module):
    """Takes the branch that its input asks for; one branch is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(36, 6)
        self.norm = nn.BatchNorm1d(6)
        self.branches = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = int(images[0, 0, 0, 0].abs() * 1000) % 3
        return self.branches[branch](self.norm(self.stem(images.flatten(1))).relu())


@dataclass(frozen=True)
class Program:
    make: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"
    flat: bool = False
    shard: str = "none"  # of a flat optimizer
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    large: bool = True  # the library treats these small gradients as it does large ones

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return self.make().to(self.dtype)

    @property
    def settings(self) -> dict[str, float]:
        return {"lr": 0.01} | ({"momentum": 0.9} if self.optimizer == "SGD" else {})

    def backward(self, model: nn.Module, step: int, virtual_rank: int, part: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + 10 * virtual_rank + part)
        images = torch.randn(3, 1, 6, 6, generator=generator).to(self.dtype)
        labels = torch.randint(CLASSES, (3,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, self.autocast):
            outputs = model(images)
        (cross_entropy(outputs, labels) / self.accumulate).backward()


VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 1e-4}
UNUSED = {"find_unused_parameters": True}
WATCHED = {"check_every": 1, "stall_after": 60.0, "straggler_every": 2}
PROGRAMS = {
    "cnn": Program(cnn, SMALL),
    "cnn, accumulated, in views": Program(cnn, VIEWS | SMALL, "SGD", accumulate=2),
    "cnn, a flat optimizer": Program(cnn, VIEWS, flat=True),
    "cnn, watched": Program(cnn, WATCHED, large=False),
    "cnn, fused": Program(cnn, {"fuse_wgrad": True}, "SGD"),
    "branches": Program(Branches, SMALL | UNUSED),
    "branches, in views": Program(Branches, VIEWS | SMALL | UNUSED, accumulate=2),
    "16 bits": Program(cnn, SMALL, dtype=torch.bfloat16),
    "half": Program(cnn, dtype=torch.float16),
    "static": Program(cnn, SMALL | {"static_graph": True}),
    "checkpointed": Program(Checkpointed, SMALL | UNUSED),
    "counting": Program(Counting),
    "autocast": Program(cnn, autocast=True),
}
FIRST_TIER = [name for name in PROGRAMS if name not in ("static", "autocast")]


class Training:
    def __init__(
        self,
        program: Program,
        group: Any = None,
        virtual_ranks: int = VIRTUAL_RANKS,
        **options: Any,
    ) -> None:
        self.program, self.model = program, program.model()
        options |= program.options
        with as_large() if program.large else nullcontext():
            self.reducer = ddp.Reducer(self.model, group, virtual_ranks=virtual_ranks, **options)
        kind: Any = getattr(ddp if program.flat else torch.optim, program.optimizer)
        own: dict[str, Any] = {}
        if program.flat:
            own = {"reducer": self.reducer, "shard": program.shard}
        self.optimizer = kind(self.model.parameters(), **program.settings, **own)

    def average(self, step: int) -> None:
        for virtual_rank in self.reducer.virtual_rank_range:
            with self.reducer.virtual_rank(virtual_rank):
                self.run(step, virtual_rank)

    def run(self, step: int, virtual_rank: int) -> None:
        for part in range(1, self.program.accumulate):
            with self.reducer.no_sync():
                self.program.backward(self.model, step, virtual_rank, part)
        self.program.backward(self.model, step, virtual_rank, 0)

    def train(self, first: int = 0, steps: int = STEPS) -> str:
        for step in range(first, steps):
            self.average(step)
            self.optimizer.step()
        return bits_of(self.model, self.optimizer)


def trained(world: ddp.World, name: str, way: str = "") -> str:
    """Trains over shared memory, or the `way`: messages, two machines, or ranks in turn on them."""
    places = {"2 machines": [world.world_size - 1, 1], "ranks in turn": lambda rank: rank % 2}
    group = group_over(world, places[way]) if way in places else None
    training = Training(PROGRAMS[name], group, shared_memory=way != "messages")
    bits = training.train()
    ddp.check_sync(training.model)
    shared = training.reducer.stats().transport == "shared memory"
    assert shared == (way != "messages" and world.world_size > 1)
    return bits


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values()]
    tensors += [states[i][name] for i in sorted(states) for name in sorted(states[i])]
    found = hashlib.sha256()
    for tensor in filter(torch.is_tensor, tensors):
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


@cache
def by_definition(name: str) -> str:
    return computed(PROGRAMS[name], VIRTUAL_RANKS, STEPS)


def computed(program: Program, virtual_ranks: int, steps: int) -> str:
    """The bits that one process computes, with a copy of the model for each virtual rank."""
    model = program.model()
    kind = getattr(torch.optim, program.optimizer)
    # Our flat AdamW has the bits of torch's fused one, and SGD those of the other.
    fused = program.flat and program.optimizer != "SGD"
    optimizer = kind(model.parameters(), fused=fused, **program.settings)
    for step in range(steps):
        copies = [copy.deepcopy(model) for _ in range(virtual_ranks)]
        for virtual_rank, each in enumerate(copies):
            with seeded(0, step, virtual_rank):
                for part in reversed(range(program.accumulate)):
                    program.backward(each, step, virtual_rank, part)
        parameters = [list(each.parameters()) for each in copies]
        for index, parameter in enumerate(model.parameters()):
            gradients = [of_copy[index].grad for of_copy in parameters]
            parameter.grad = None
            if any(gradient is not None for gradient in gradients):
                zero = torch.zeros_like(parameter)
                # Of 16 bits they are divided before they are added.
                is_narrow = zero.element_size() == 2
                before, after = (virtual_ranks, 1) if is_narrow else (1, virtual_ranks)
                leaves = [zero if g is None else g / before for g in gradients]
                while len(leaves) > 1:
                    leaves = [low + high for low, high in zip(*[iter(leaves)] * 2, strict=True)]
                parameter.grad = leaves[0] / after + 0.0
        for buffer, value in zip(model.buffers(), copies[0].buffers(), strict=True):
            buffer.copy_(value)
        optimizer.step()
    return bits_of(model, optimizer)
