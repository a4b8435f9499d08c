"""A random training program as plain data, and what plays it: on real ranks or in one process.

A `Case` is a model, the settings of what averages its gradients, and a list of operations that all
ranks play alike, except that a forward pass may take other branches on each rank. A `Player` plays
one rank's part. Everything random (weights, inputs) comes from numbers in the case.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import conv2d
from torch.utils.checkpoint import checkpoint

WIDTH = 3
LR = 0.002  # gradients must not explode: rounding is compared with their size
# With the bits of this library's.
TORCHS = {"SGD": torch.optim.SGD, "AdamW": partial(torch.optim.AdamW, fused=True)}
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")
}


@dataclass(frozen=True)
class Forward:
    """`use[rank]` are the branches; each gives an output. Its graph is kept for a Backward."""

    use: tuple[tuple[int, ...], ...]
    no_sync: bool = False


@dataclass(frozen=True)
class Backward:
    """From the sum of losses of graphs that are alive: `back` 0 is the last, 1 the one before."""

    back: tuple[int, ...] = (0,)
    outputs: str = "all"  # or "first" or "rest", of each graph
    no_sync: bool = False
    keep: bool = False  # retain_graph


@dataclass(frozen=True)
class Zero:
    set_to_none: bool = True


@dataclass(frozen=True)
class Step:
    """The optimizer's. No graph is alive afterwards."""


@dataclass(frozen=True)
class Freeze:
    """Sets `requires_grad` of a parameter, on one rank or (None) on all."""

    parameter: int
    frozen: bool = True
    rank: int | None = None


@dataclass(frozen=True)
class Evaluate:
    """One rank alone, without gradients."""

    rank: int


@dataclass(frozen=True)
class Weigh:
    """How much each rank's gradients count in the next average."""

    amounts: tuple[float, ...]


@dataclass(frozen=True)
class Join:
    """`batches[rank]` steps in a `join()`, each through all branches."""

    batches: tuple[int, ...]
    initial: bool = True  # divide by the number of all ranks


@dataclass(frozen=True)
class Move:
    """Puts gradients elsewhere in memory.

    Attributes:
        how: with the parameters, as `module.to(...)` does ("both"), or by way of float16 ("half");
            `.grad.data` alone ("data"), or a `.grad` of its own ("detached").
    """

    how: str = "both"


@dataclass(frozen=True)
class Again:
    """Takes the Reducer off and makes a new one."""


@dataclass(frozen=True)
class KeepViews:
    """Gradients lie in their buckets from now on."""


@dataclass(frozen=True)
class Transform:
    """One rank alone: torch.func.grad with respect to the input."""

    rank: int


Operation = (Move | Again | KeepViews | Transform | Forward | Backward) | (
    Zero | Step | Freeze | Evaluate | Weigh | Join
)


@dataclass(frozen=True)
class Parameter:
    """A weight of `rows` by WIDTH.

    Attributes:
        kind: "matrix"; with other strides, "transposed" or with "holes"; "conv", channels last; an
            embedding's "table" with sparse gradients; a "scalar".
    """

    rows: int
    dtype: str = "float32"
    frozen: bool = False
    kind: str = "matrix"


@dataclass(frozen=True)
class Case:
    """See the module's docstring.

    Attributes:
        branches: the parameters of each branch's layers, in order; one may be in several.
        wrapped: by `DistributedDataParallel`, not by a bare `Reducer`.
        divided: ranks may fail to meet: a group of their own with a short timeout.
        hook: a name of `fuzz_play.HOOKS`.
        checkpoint: "reentrant" or "not reentrant": each branch is computed again in backward.
        batch_norm: of the inputs, over the batches of all ranks, between parameters. Below it is a
            parameter that only ranks use which use branch 0.
        writes: forward passes write to a parameter, on each rank its "own", or on all "alike".
        broadcast_buffers: of a bare Reducer.
        optimizer: "SGD" or "AdamW".
        flat: this library's optimizer in place of torch's.
        fuse_wgrad: the option; layers are `nn.Linear` and `nn.Embedding` in turn.
        node_shared: the one with a copy for all ranks, which are on one machine.
        shared_memory: of the Reducer; gloo alone without.
        straggler_every: of the Reducer; its reports go nowhere.
        halves: two Reducers, each for every other parameter.
        large: the library treats these small gradients as it does large ones.
        autocast: forward passes compute in bfloat16.
    """

    world_size: int
    parameters: tuple[Parameter, ...]
    branches: tuple[tuple[int, ...], ...]
    operations: tuple[Operation, ...]
    buffers: bool = False
    wrapped: bool = False
    bucket_cap_mb: float | tuple[float, ...] | None = None
    overlap: bool = True
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    divided: bool = False
    hook: str | None = None
    checkpoint: str | None = None
    batch_norm: bool = False
    optimizer: str = "SGD"
    flat: bool = False
    fuse_wgrad: bool = False
    node_shared: bool = False
    shared_memory: bool = True
    straggler_every: int | None = None
    halves: bool = False
    large: bool = False
    autocast: bool = False
    momentum: float = 0.0
    writes: str | None = None
    broadcast_buffers: bool = False
    seed: int = 0

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        # A large eps: AdamW's step with a gradient near 0 would show each rounding of it.
        return {"lr": LR} | (
            {"momentum": self.momentum} if self.optimizer == "SGD" else {"eps": 0.1}
        )

    @property
    def coarse(self) -> bool:
        """Whether rounding to 16 bits is part of it."""
        return self.autocast or any(p.dtype.endswith("float16") for p in self.parameters)

    @property
    def sends_buffers(self) -> bool:
        """Whether buffers are rank 0's after each average."""
        return self.wrapped or self.broadcast_buffers

    def __str__(self) -> str:
        """The program in a few lines."""
        options = [
            f"{name}={getattr(self, name)}"
            for name, default in (
                ("bucket_cap_mb", None),
                ("overlap", True),
                ("gradient_as_bucket_view", False),
                ("find_unused_parameters", False),
                ("static_graph", False),
                ("hook", None),
                ("checkpoint", None),
                ("batch_norm", False),
                ("optimizer", "SGD"),
                ("flat", False),
                ("fuse_wgrad", False),
                ("node_shared", False),
                ("shared_memory", True),
                ("straggler_every", None),
                ("halves", False),
                ("large", False),
                ("autocast", False),
                ("momentum", 0.0),
                ("writes", None),
                ("broadcast_buffers", False),
            )
            if getattr(self, name) != default
        ]
        parameters = [
            f"p{i} {p.kind} {p.rows}x{WIDTH} {p.dtype}{' frozen' * p.frozen}"
            for i, p in enumerate(self.parameters)
        ]
        branches = [" ".join(f"p{i}" for i in branch) for branch in self.branches]
        return "\n".join(
            [
                f"{self.world_size} ranks, "
                f"{'DistributedDataParallel' if self.wrapped else 'Reducer'}"
                f"({', '.join(options)}), seed {self.seed}{', with buffers' * self.buffers}",
                f"parameters: {', '.join(parameters)}",
                *(f"branch {i}: {branch}" for i, branch in enumerate(branches)),
                *(f"{number:3d} {op}" for number, op in enumerate(self.operations)),
            ]
        )


def weight_of(p: Parameter, generator: torch.Generator) -> nn.Parameter:
    shape = {"scalar": (), "conv": (p.rows, WIDTH, 2, 2)}.get(p.kind, (p.rows, WIDTH))
    values = (torch.randn(shape, generator=generator) / 2).to(DTYPES[p.dtype])
    if p.kind == "conv":
        values = values.contiguous(memory_format=torch.channels_last)
    elif p.kind == "transposed":
        values = values.t().contiguous().t()
    elif p.kind == "holes":
        values = values.new_zeros(20 * p.rows).as_strided(shape, (20, 2)).copy_(values)
    return nn.Parameter(values, requires_grad=not p.frozen)


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.weight.is_complex():
            complex_ = h.to(self.weight.dtype)
            return h + (torch.tanh(complex_ @ self.weight.T) @ self.weight.conj()).real
        h = h.to(self.weight.dtype)
        if self.weight.dim() == 0:
            return h + torch.tanh(h * self.weight)
        if self.weight.dim() == 4:
            image = torch.tanh(h).view(-1, WIDTH, 1, 1) * torch.linspace(0, 1, 9).view(3, 3)
            return h + conv2d(image.to(h.dtype), self.weight).square().mean((1, 2, 3))[:, None]
        return h + torch.tanh(h @ self.weight.T) @ self.weight


class LinearLayer(nn.Module):
    """As `Layer`, with a weight that `fuse_wgrad` takes, and gradients from there alone."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        h = self.linear(h.to(weight.dtype))
        return torch.tanh(h) @ weight.detach()


class EmbeddingLayer(nn.Module):
    """As `LinearLayer`, with the rows of an embedding."""

    def __init__(self, weight: nn.Parameter, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*weight.shape, device="meta", sparse=sparse)
        self.embedding.weight = weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        # Some rows several times, others never.
        tokens = torch.arange(3 * len(h)).square() % len(self.embedding.weight)
        rows = self.embedding(tokens).view(len(h), 3, -1).sum(1)
        h = h.to(rows.dtype)
        return h + torch.tanh(h) * torch.tanh(rows)


class First(nn.Module):
    """What comes before all branches of a case with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, side: torch.Tensor | None) -> Any:
        return self.norm(self.below(x, side))

    def below(self, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        return x * self.scale if side is None else x * self.scale + x.flip(0) * side


class Net(nn.Module):
    """Branches of layers, some of which share a parameter; what no branch has is never used."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.first = First() if case.batch_norm else None
        generator = torch.Generator().manual_seed(1000 * case.seed + rank)
        weights = [weight_of(p, generator) for p in case.parameters]
        # By its place in a branch, so that a linear layer and an embedding may share a weight.
        kinds = cycle((LinearLayer, EmbeddingLayer) if case.fuse_wgrad else (Layer,))

        def layer(index: int, kind: Any) -> nn.Module:
            if case.parameters[index].kind == "table":
                kind = partial(EmbeddingLayer, sparse=True)
            elif case.parameters[index].kind != "matrix" or weights[index].is_complex():
                kind = Layer
            return kind(weights[index])

        self.branches = nn.ModuleList(
            nn.ModuleList(layer(i, kind) for i, kind in zip(branch, kinds, strict=False))
            for branch in case.branches
        )
        self.weights = nn.ParameterList(weights)
        self.checkpoint = case.checkpoint
        # In the first bucket, as the last to be registered, and the last to get its gradient.
        if case.batch_norm:
            self.side = nn.ParameterList([torch.tensor([0.1, 0.2, 0.3])])
        self.writes, self.written = case.writes, None
        if case.writes:
            self.written = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        if case.buffers:
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, use: Sequence[int]) -> dict[int, Any]:
        if hasattr(self, "mean"):
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.5).add_(x.mean(0))
                    self.count += 1
            x = x - self.mean
        if self.written is not None:
            if self.training:
                with torch.no_grad():
                    self.written.add_(x.mean(0) if self.writes == "own" else 0.5)
            x = x - self.written
        if self.first is not None:
            x = self.first(x, self.side[0] if 0 in use else None)
        again = self.checkpoint if torch.is_grad_enabled() else None
        if again == "reentrant":
            x = x if x.requires_grad else x.detach().requires_grad_()
        outputs = {}
        for branch in use:
            if again is None:
                h = self.compute(branch, x)
            else:
                h = checkpoint(self.compute, branch, x, use_reentrant=again == "reentrant")
            outputs[branch] = (h, [h.shape])
        return outputs

    def compute(self, branch: int, h: torch.Tensor) -> torch.Tensor:
        for layer in self.branches[branch]:
            h = layer(h)
        return h


def loss_of(graph: dict[int, Any], outputs: str) -> torch.Tensor:
    chosen = [(1 + branch) * h.double().square().mean() for branch, (h, _) in graph.items()]
    chosen = {"all": chosen, "first": chosen[:1], "rest": chosen[1:]}[outputs]
    return torch.stack(chosen).sum() if chosen else torch.zeros(())


class Player:
    """One rank of a case.

    Args:
        case: what is played.
        rank: whose part.
        model: its Net.
        called: what forward passes call, if not the model itself.
        no_sync: makes a context for what is accumulated locally.
        weigh: takes this rank's amount.
        join: makes a context for unequal numbers of steps; takes whom to divide by.
        keep_views: does what `KeepViews` says.
        again: takes a Reducer off and makes a new one.
        optimizer: makes one of parameters and settings; None means torch's.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        model: Net,
        called: Callable[..., Any] | None = None,
        no_sync: Callable[[], Any] = contextlib.nullcontext,
        weigh: Callable[[float], None] | None = None,
        join: Callable[[bool], Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        again: Callable[["Player"], None] | None = None,
        keep_views: Callable[[], None] = lambda: None,
    ) -> None:
        self.keep_views = keep_views
        self.case, self.rank, self.model = case, rank, model
        self.called, self.no_sync = called or model, no_sync
        self.weigh, self.join, self.again = weigh, join, again
        self.parameters = list(model.weights)
        if model.first is not None:
            self.parameters += [*model.first.parameters(), *model.side]
        if model.written is not None:
            self.parameters.append(model.written)
        self.retain = False  # every graph
        self.graphs: list[dict[int, Any]] = []
        optimizer = optimizer or TORCHS[case.optimizer]
        self.optimizer = optimizer(self.parameters, **case.optimizer_settings)

    def play(self, number: int, op: Operation) -> None:
        """The case's operation with this number."""
        if isinstance(op, Forward):
            autocast = torch.autocast("cpu", torch.bfloat16, self.case.autocast)
            with self._within(op.no_sync), autocast:
                self.graphs.append(self.called(self.input(number), op.use[self.rank]))
        elif isinstance(op, Backward):
            graphs = [self.graphs[-1 - back] for back in op.back]
            loss = sum(loss_of(graph, op.outputs) for graph in graphs)
            with self._within(op.no_sync):
                loss.backward(retain_graph=op.keep or self.retain)
            if not op.keep:
                self.graphs = [g for g in self.graphs if all(g is not used for used in graphs)]
        elif isinstance(op, Zero):
            self.optimizer.zero_grad(op.set_to_none)
        elif isinstance(op, Step):
            self.optimizer.step()
            self.graphs = []
        elif isinstance(op, Freeze):
            if op.rank in (None, self.rank):
                self.parameters[op.parameter].requires_grad_(not op.frozen)
        elif isinstance(op, Weigh):
            assert self.weigh is not None
            self.weigh(op.amounts[self.rank])
        elif isinstance(op, Join):
            assert self.join is not None
            with self.join(op.initial):
                for batch in range(op.batches[self.rank]):
                    self.forward_backward(number, batch)
                    self.update()
            self.graphs = []
        elif isinstance(op, KeepViews):
            self.keep_views()
        elif isinstance(op, Move):
            if op.how == "both":
                self.model._apply(torch.clone)
            elif op.how == "half":
                self.model.half().float()
            for p in self.parameters if op.how in ("data", "detached") else ():
                if p.grad is not None and op.how == "data":
                    p.grad.data = p.grad.data.clone()
                elif p.grad is not None:
                    p.grad = p.grad.detach()
        elif isinstance(op, Again):
            if self.again is not None:
                self.again(self)
        elif op.rank == self.rank and isinstance(op, Transform):
            self.called.eval()
            torch.func.grad(lambda x: self._loss_of_all(x))(self.input(number))
            self.called.train()
        elif op.rank == self.rank:
            with torch.no_grad():
                self.called.eval()(self.input(number), range(len(self.case.branches)))
                self.called.train()

    def _loss_of_all(self, x: torch.Tensor) -> torch.Tensor:
        return loss_of(self.called(x, range(len(self.case.branches))), "all")

    def forward_backward(self, number: int, batch: int) -> None:
        """A step within a `Join`, up to the averages."""
        graph = self.called(self.input(number, batch), range(len(self.case.branches)))
        loss_of(graph, "all").backward()

    def update(self) -> None:
        """The rest of a step within a `Join`."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> "State":
        return State(
            [None if p.grad is None else _numbers(p.grad) for p in self.parameters],
            [_numbers(p) for p in self.parameters],
            [_numbers(b) for b in self.model.buffers()],
        )

    def _within(self, no_sync: bool) -> Any:
        return self.no_sync() if no_sync else contextlib.nullcontext()

    def input(self, number: int, batch: int = 0) -> torch.Tensor:
        """The batch of an operation."""
        seed = self.case.seed + 100 * number + self.rank + 10 * batch
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, WIDTH, generator=generator)


@dataclass
class State:
    """What a rank holds after an operation, in float64, which has every other dtype's values."""

    gradients: "list[np.ndarray[Any, Any] | None]"
    parameters: "list[np.ndarray[Any, Any]]"
    buffers: "list[np.ndarray[Any, Any]]"


def _numbers(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.double().numpy().copy()
