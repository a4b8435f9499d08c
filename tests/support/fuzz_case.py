"""A training program as plain data, and what plays it: on real ranks or in one process.

A `Case` is a model, settings, and operations. All ranks have the same, but a forward pass may take
another branch on each. A `Player` is one rank. All that is random comes from the case.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import conv2d
from torch.utils.checkpoint import checkpoint

import ddp_from_scratch as ddp
from tests.support.terms import as_large

WIDTH = 3
LR = 0.002  # gradients must not explode: rounding is compared with their size
DIVIDED_LIMIT_S = 1.5
# With the bits of this library's.
TORCHS = {"SGD": torch.optim.SGD, "AdamW": partial(torch.optim.AdamW, fused=True)}


@dataclass(frozen=True)
class Forward:
    """`use[rank]` are the branches; each gives an output. Its graph is kept for a Backward.

    Gradients of the parameters `absent[rank]` are undefined in this pass; () for all ranks' none.
    """

    use: tuple[tuple[int, ...], ...]
    no_sync: bool = False
    absent: tuple[tuple[int, ...], ...] = ()


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
class BackwardAndStep:
    """`backward_and_step` from the last graph. Without a flat optimizer it is one after another."""

    max_norm: float | None = None


@dataclass(frozen=True)
class Freeze:
    """Freezes or thaws a parameter, or (None) all that were trained at first."""

    parameter: int | None
    frozen: bool = True
    rank: int | None = None


@dataclass(frozen=True)
class Grow:
    """Gives a buffer one more element, on one rank or (None) on all."""

    rank: int | None = None


@dataclass(frozen=True)
class Set:
    """Multiplies the optimizer's learning rate, on one rank or (None) on all."""

    factor: float
    rank: int | None = None


@dataclass(frozen=True)
class Differentiate:
    """`torch.autograd.grad` of the last graph, written into `.grad`."""


@dataclass(frozen=True)
class Average:
    """`average_gradients()`."""


@dataclass(frozen=True)
class Evaluate:
    """One rank alone, without gradients."""

    rank: int


@dataclass(frozen=True)
class Transform:
    """One rank alone: torch.func.grad with respect to the input."""

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
    """Puts gradients elsewhere in memory (`Player.move`), on one rank or (None) on all."""

    how: str = "both"
    rank: int | None = None


@dataclass(frozen=True)
class Again:
    """Makes a new Reducer for the module; the old one is removed before, or left behind."""

    removes: bool = True


@dataclass(frozen=True)
class Second:
    """Makes one more Reducer, with views, for a part of the module: the branch."""

    branch: int


@dataclass(frozen=True)
class KeepViews:
    """Gradients lie in their buckets from now on."""


@dataclass(frozen=True)
class Parameter:
    """A weight of `rows` by WIDTH."""

    rows: int
    dtype: str = "float32"
    frozen: bool = False
    # Or "transposed", "holes", "conv", "scalar", or a sparse "table"; "conjugated", whose gradient
    # is a lazy conjugate; "precise", whose gradient is float32 whatever its own dtype is.
    kind: str = "matrix"


@dataclass(frozen=True)
class Case:
    world_size: int
    parameters: tuple[Parameter, ...]
    branches: tuple[tuple[int, ...], ...]  # the parameters of each branch's layers, in order
    operations: tuple[Any, ...]
    buffers: bool = False
    wrapped: bool = False  # by `DistributedDataParallel`, not by a bare `Reducer`
    bucket_cap_mb: float | tuple[float, ...] | None = None
    overlap: bool = True
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    divided: bool = False  # ranks may fail to meet: a group of their own with a short timeout
    hook: str | None = None  # a name of `HOOKS`
    reduce: str = "mean"  # or "sum"
    check_finite: bool = False  # of a bare `Reducer`
    checkpoint: str | None = None  # "reentrant" or "not reentrant"
    batch_norm: bool = False  # of all ranks' inputs; below it is a parameter of branch 0 (`First`)
    optimizer: str = "SGD"  # or "AdamW"; or, with `flat`, "Muon"
    flat: bool = False  # an optimizer of this library
    fuse_wgrad: bool = False  # layers are `nn.Linear` and `nn.Embedding` in turn
    shard: str = "none"  # of a flat optimizer
    shared_memory: bool = True
    halves: bool = False  # two Reducers, each for every other parameter
    large: bool = False  # small gradients are treated as large ones
    autocast: bool = False
    momentum: float = 0.0
    writes: str | None = None  # in forward: "own" values on each rank, or "equal" ones on all
    sync_buffers: bool = False
    seed: int = 0

    @property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(len(self.branches)))

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        # A large eps: AdamW's step with a gradient near 0 would show each rounding of it.
        sgd = self.optimizer == "SGD"
        return {"lr": LR} | ({"momentum": self.momentum} if sgd else {"eps": 0.1})

    @property
    def coarse(self) -> bool:
        return self.autocast or any(p.dtype.endswith("float16") for p in self.parameters)

    @property
    def clips(self) -> bool:
        return any(getattr(op, "max_norm", None) is not None for op in self.operations)

    @property
    def sends_buffers(self) -> bool:
        return self.wrapped or self.sync_buffers

    def __str__(self) -> str:
        own = ("parameters", "branches", "operations")
        settings = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in own and getattr(self, field.name) != field.default
        ]
        parts = [("parameter ", self.parameters), ("branch ", self.branches), ("", self.operations)]
        lines = [f"{kind}{i}: {each}" for kind, every in parts for i, each in enumerate(every)]
        return "\n".join([", ".join(settings), *lines])


def weight_of(p: Parameter, generator: torch.Generator, device: Any) -> nn.Parameter:
    shape = {"scalar": (), "conv": (p.rows, WIDTH, 2, 2)}.get(p.kind, (p.rows, WIDTH))
    values = (torch.randn(shape, generator=generator) / 2).to(getattr(torch, p.dtype))
    if p.kind == "conv":
        values = values.contiguous(memory_format=torch.channels_last)
    elif p.kind == "transposed":
        values = values.t().contiguous().t()
    elif p.kind == "holes":
        values = values.new_zeros(20 * p.rows).as_strided(shape, (20, 2)).copy_(values)
    weight = nn.Parameter(values.to(device), requires_grad=not p.frozen)
    if p.kind == "precise":
        weight.grad_dtype = torch.float32
    return weight


_RAMP = torch.linspace(0, 1, 9).view(3, 3)


class Absent(torch.autograd.Function):
    """A weight whose gradient is undefined."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return None


class Precise(torch.autograd.Function):
    """A product in float32, and so is the gradient of the weight."""

    @staticmethod
    def forward(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return h @ weight.float().T

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        h, weight = context.saved_tensors
        return gradient @ weight.float(), gradient.T @ h


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = weight, kind

    def forward(self, h: torch.Tensor, is_absent: bool = False) -> torch.Tensor:
        weight = Absent.apply(self.weight) if is_absent else self.weight
        if self.kind == "conjugated":
            return h + (torch.tanh(h).to(weight.dtype)[:, None] * weight.conj()).real.sum(1)
        if self.kind == "precise":
            return h + torch.tanh(Precise.apply(h.float(), weight)).sum(1, keepdim=True)
        if weight.is_complex():
            complex_ = h.to(weight.dtype)
            return h + (torch.tanh(complex_ @ weight.T) @ weight.conj()).real
        h = h.to(weight.dtype)
        if weight.dim() == 0:
            return h + torch.tanh(h * weight)
        if weight.dim() == 4:
            image = torch.tanh(h).view(-1, WIDTH, 1, 1) * _RAMP.to(h.device)
            return h + conv2d(image.to(h.dtype), weight).square().mean((1, 2, 3))[:, None]
        return h + torch.tanh(h @ weight.T) @ weight


class LinearLayer(nn.Module):
    """As `Layer`, with a weight that `fuse_wgrad` takes, and gradients from there alone."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = weight

    def forward(self, h: torch.Tensor, is_absent: bool = False) -> torch.Tensor:
        weight = self.linear.weight
        return torch.tanh(self.linear(h.to(weight.dtype))) @ weight.detach()


class EmbeddingLayer(nn.Module):
    """As `LinearLayer`, with the rows of an embedding."""

    def __init__(self, weight: nn.Parameter, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*weight.shape, device="meta", sparse=sparse)
        self.embedding.weight = weight

    def forward(self, h: torch.Tensor, is_absent: bool = False) -> torch.Tensor:
        # Some rows several times, others never.
        tokens = torch.arange(3 * len(h), device=h.device).square() % len(self.embedding.weight)
        rows = self.embedding(tokens).view(len(h), 3, -1).sum(1)
        h = h.to(rows.dtype)
        return h + torch.tanh(h) * torch.tanh(rows)


class First(nn.Module):
    """What comes before all branches of a case with batch norm."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0], device=device))
        self.norm = nn.BatchNorm1d(WIDTH, device=device)

    def forward(self, x: torch.Tensor, side: torch.Tensor | None) -> Any:
        return self.norm(self.below(x, side))

    def below(self, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        return x * self.scale if side is None else x * self.scale + x.flip(0) * side


class Net(nn.Module):
    """Branches of layers, some of which share a parameter; what no branch has is never used."""

    def __init__(self, case: Case, rank: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.case = case
        self.first = First(device) if case.batch_norm else None
        generator = torch.Generator().manual_seed(1000 * case.seed + rank)
        weights = [weight_of(p, generator, device) for p in case.parameters]

        # In turn, so that a fused layer and one that torch computes may share a weight.
        kinds: Any = cycle((LinearLayer, EmbeddingLayer) if case.fuse_wgrad else (Layer,))

        def layer(index: int, make: Any) -> nn.Module:
            kind = case.parameters[index].kind
            if kind == "table":
                make = partial(EmbeddingLayer, sparse=True)
            elif kind != "matrix" or weights[index].is_complex() or make is Layer:
                make = partial(Layer, kind=kind)
            return make(weights[index])

        self.branches = nn.ModuleList(
            nn.ModuleList(layer(index, next(kinds)) for index in branch) for branch in case.branches
        )
        self.weights = nn.ParameterList(weights)
        self.checkpoint = case.checkpoint
        # In the first bucket, as the last to be registered, and the last to get its gradient.
        side = torch.tensor([0.1, 0.2, 0.3], device=device)
        self.side = nn.ParameterList([side] * case.batch_norm)
        if case.writes:
            self.written = nn.Parameter(torch.zeros(WIDTH, device=device), requires_grad=False)
        if case.buffers:
            self.register_buffer("mean", torch.zeros(WIDTH, device=device))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
            self.register_buffer("grown", torch.zeros(1, device=device))

    def forward(
        self, x: torch.Tensor, use: Sequence[int], absent: Sequence[int] = ()
    ) -> dict[int, Any]:
        if self.case.buffers:
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.5).add_(x.mean(0))
                    self.count += 1
            x = x - self.mean + 0.1 * self.grown.mean()
        if self.case.writes:
            if self.training:
                with torch.no_grad():
                    self.written.add_(x.mean(0) if self.case.writes == "own" else 0.5)
            x = x - self.written
        if self.first is not None:
            x = self.first(x, self.side[0] if 0 in use else None)
        again = self.checkpoint if torch.is_grad_enabled() else None
        if again == "reentrant":
            x = x if x.requires_grad else x.detach().requires_grad_()
        outputs = {}
        for branch in use:
            if again is None:
                h = self.compute(branch, x, absent)
            else:
                h = checkpoint(self.compute, branch, x, absent, use_reentrant=again == "reentrant")
            outputs[branch] = (h, [h.shape])
        return outputs

    def compute(self, branch: int, h: torch.Tensor, absent: Sequence[int]) -> torch.Tensor:
        for layer, index in zip(self.branches[branch], self.case.branches[branch], strict=True):
            h = layer(h, index in absent)
        return h


def part(values: Sequence[Any], outputs: str) -> Sequence[Any]:
    """Those of a graph's branches that a Backward with these `outputs` begins from."""
    return {"all": values, "first": values[:1], "rest": values[1:]}[outputs]


def loss_of(graph: dict[int, Any], outputs: str = "all") -> torch.Tensor:
    losses = [(1 + branch) * h.double().square().mean() for branch, (h, _) in graph.items()]
    chosen = part(losses, outputs)
    return torch.stack(chosen).sum() if chosen else torch.zeros(())


class Both:
    """torch.optim.Muon and torch.optim.AdamW as one optimizer, for `muon_groups`."""

    def __init__(self, matrices: dict[str, Any], others: dict[str, Any]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon([matrices])]
        if others["params"]:
            self.optimizers.append(torch.optim.AdamW([others], fused=True))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def muon_groups(case: Case, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """The matrices, and all else for AdamW."""
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    # Orthogonal matrices show each rounding of bfloat16, and of a gradient near 0.
    muon = {"params": matrices, "lr": LR / 4, "momentum": case.momentum, "eps": 0.1}
    return [muon, {"params": others, "use_muon": False, "lr": LR, "eps": 0.1}]


class Player:
    """One rank of a case, whose gradients nobody averages."""

    def __init__(self, case: Case, rank: int, model: Net) -> None:
        self.case, self.rank, self.model = case, rank, model
        self.called: Any = model  # in forward passes
        self.parameters = [*model.weights]
        if case.batch_norm:
            self.parameters += [*model.first.parameters(), *model.side]
        if case.writes:
            self.parameters.append(model.written)
        self.trained = [p for p in self.parameters if p.requires_grad]  # at first
        self.retain = False  # every graph
        self.graphs: list[dict[int, Any]] = []
        self.device = self.parameters[0].device
        self.prepare()
        self.optimizer = self.make_optimizer()

    def prepare(self) -> None:
        """Wraps the model."""

    def make_optimizer(self) -> Any:
        if self.case.optimizer == "Muon":
            return Both(*muon_groups(self.case, self.parameters))
        return TORCHS[self.case.optimizer](self.parameters, **self.case.optimizer_settings)

    def no_sync(self) -> Any:
        return nullcontext()

    def play(self, number: int, op: Any) -> None:  # noqa: C901
        """The case's operation with this number."""
        match op:
            case Forward():
                autocast = torch.autocast(self.device.type, torch.bfloat16, self.case.autocast)
                with self.no_sync() if op.no_sync else nullcontext(), autocast:
                    absent = op.absent[self.rank] if op.absent else ()
                    graph = self.called(self.input(number), op.use[self.rank], absent)
                    self.graphs.append(graph)
            case Backward():
                graphs = [self.graphs[-1 - back] for back in op.back]
                loss = sum(loss_of(graph, op.outputs) for graph in graphs)
                with self.no_sync() if op.no_sync else nullcontext():
                    loss.backward(retain_graph=op.keep or self.retain)
                if not op.keep:
                    self.graphs = [g for g in self.graphs if all(g is not used for used in graphs)]
            case Zero():
                self.optimizer.zero_grad(op.set_to_none)
            case Step():
                self.optimizer.step()
                self.graphs = []
            case BackwardAndStep():
                self.play(number, Backward())
                if op.max_norm is not None:
                    self.clip(op.max_norm)
                self.play(number, Step())
            case Freeze(rank=None) | Freeze(rank=self.rank):
                one = op.parameter
                for p in self.trained if one is None else [self.parameters[one]]:
                    p.requires_grad_(not op.frozen)
            case Grow(rank=None) | Grow(rank=self.rank):
                values = torch.full((len(self.model.grown) + 1,), self.rank + 1.0)
                self.model.grown = values.to(self.device)
            case Set(rank=None) | Set(rank=self.rank):
                for group in self.groups():
                    group["lr"] *= op.factor
            case Differentiate():
                inputs = [p for p in self.parameters if p.requires_grad]
                loss = loss_of(self.graphs.pop())
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
                for p, gradient in zip(inputs, gradients, strict=True):
                    p.grad = p.grad if gradient is None else gradient
            case Move(rank=None) | Move(rank=self.rank):
                self.move(op.how)
            case Evaluate(rank=self.rank):
                with torch.no_grad():
                    self.called.eval()(self.input(number), self.case.everything)
                self.called.train()
            case Transform(rank=self.rank):
                self.called.eval()
                everything = self.case.everything
                torch.func.grad(lambda x: loss_of(self.called(x, everything)))(self.input(number))
                self.called.train()

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        each = getattr(self.optimizer, "optimizers", [self.optimizer])
        return [group for optimizer in each for group in optimizer.param_groups]

    def clip(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        squares = [v.to_dense().abs().double().square().sum() for v in gradients]
        norm = sum(squares, torch.zeros((), dtype=torch.float64)).sqrt()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def move(self, how: str) -> None:
        if how == "both":
            self.model._apply(torch.clone)
        elif how == "half":
            self.model.half().float()
        elif how == "contiguous":
            self.model.to(memory_format=torch.contiguous_format)
        else:
            for p in self.parameters:
                if p.grad is not None and how == "data":
                    p.grad.data = p.grad.data.clone()
                elif p.grad is not None:
                    p.grad = p.grad.detach()

    def forward_backward(self, number: int, batch: int) -> None:
        """A step within a `Join`, up to the averages."""
        loss_of(self.called(self.input(number, batch), self.case.everything)).backward()

    def update(self) -> None:
        """The rest of a step within a `Join`."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def input(self, number: int, batch_number: int = 0) -> torch.Tensor:
        seed = self.case.seed + 100 * number + self.rank + 10 * batch_number
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        return batch.to(self.device)

    def state(self) -> dict[str, list[Any]]:
        """What a rank holds, in float64, which has every other dtype's values."""
        return {
            "gradients": [None if p.grad is None else _numbers(p.grad) for p in self.parameters],
            "parameters": [_numbers(p) for p in self.parameters],
            "buffers": [_numbers(b) for b in self.model.buffers()],
        }


def _numbers(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.cpu().double().numpy().copy()


class Torchs(Player):
    def prepare(self) -> None:
        names = "gradient_as_bucket_view", "find_unused_parameters", "static_graph"
        options = {name: getattr(self.case, name) for name in names}
        kind = nn.parallel.DistributedDataParallel
        self.called = kind(self.model, bucket_cap_mb=1e-5, **options)
        if self.case.reduce == "sum":
            self.called.register_comm_hook(None, summed)
        sends = self.case.sends_buffers
        self.called.broadcast_buffers = self.called.forward_sync_buffers = sends
        self.no_sync = self.called.no_sync  # type: ignore[method-assign]


class Ours(Player):
    def __init__(self, case: Case, rank: int, model: Net, group: Any) -> None:
        self.group, self.reducers = group, list[ddp.Reducer]()
        self.seconds: list[ddp.Reducer] = []
        super().__init__(case, rank, model)

    def prepare(self) -> None:
        case = self.case
        names = "bucket_cap_mb gradient_as_bucket_view find_unused_parameters static_graph"
        names = [*names.split(), "fuse_wgrad", "shared_memory", "reduce"]
        options = {name: getattr(case, name) for name in names}
        if case.batch_norm:
            ddp.convert_sync_batchnorm(self.model, self.group)
        if case.wrapped:
            self.called = ddp.DistributedDataParallel(
                self.model, process_group=self.group, **options
            )
            self.reducers = [self.called.reducer]
        else:
            if not self.reducers:  # later they are equal, and graphs may be alive
                ddp.broadcast_parameters(self.model, process_group=self.group)
            options |= {"overlap": case.overlap, "sync_buffers": case.sync_buffers}
            options["check_finite"] = case.check_finite
            trains = [name for name, p in self.model.named_parameters() if p.requires_grad]
            self.reducers = [
                ddp.Reducer(self.model, self.group, ignore=ignored, **options)
                for ignored in ([trains[::2], trains[1::2]] if case.halves else [()])
            ]
        for reducer in self.reducers:
            if case.hook is not None:
                state = self.group
                if case.hook == "int8_blockwise":
                    state = ddp.comm_hooks.Int8State(self.group)
                reducer.register_comm_hook(state, HOOKS[case.hook])

    def make_optimizer(self) -> Any:
        if not self.case.flat:
            return super().make_optimizer()
        if self.case.optimizer == "Muon":
            groups = [g for g in muon_groups(self.case, self.parameters) if g["params"]]
            # With torch's bits on every machine.
            return ddp.Muon(groups, reducer=self.reducers[-1], ns_dtype=torch.bfloat16)
        settings = self.case.optimizer_settings | {"shard": self.case.shard}
        return getattr(ddp, self.case.optimizer)(
            self.parameters, reducer=self.reducers[-1], **settings
        )

    @contextmanager
    def no_sync(self) -> Any:
        with ExitStack() as stack:
            for each in [*([self.called] if self.case.wrapped else self.reducers), *self.seconds]:
                stack.enter_context(each.no_sync())
            yield

    def remove(self) -> None:
        for reducer in (*self.reducers, *self.seconds):
            reducer.remove()
        self.seconds = []

    def play(self, number: int, op: Any) -> None:  # noqa: C901
        match op:
            case Weigh():
                for reducer in (*self.reducers, *self.seconds):
                    reducer.weight(op.amounts[self.rank])
            case Average():
                for reducer in (*self.reducers, *self.seconds):
                    reducer.average_gradients()
            case Second():
                part, memory = self.model.branches[op.branch], self.case.shared_memory
                options = {"gradient_as_bucket_view": True, "shared_memory": memory}
                self.seconds.append(ddp.Reducer(part, self.group, **options))
            case BackwardAndStep() if self.case.flat and self.case.optimizer != "Muon":
                self.optimizer.backward_and_step(loss_of(self.graphs[-1]), max_norm=op.max_norm)
                self.graphs = []
            case KeepViews():
                for reducer in self.reducers:
                    reducer.keep_bucket_views()
            case Join():
                wrapped = self.case.wrapped
                join = self.called.join if wrapped else partial(ddp.join, self.reducers[0])
                with join(divide_by_initial_world_size=op.initial):
                    for batch in range(op.batches[self.rank]):
                        self.forward_backward(number, batch)
                        self.update()
                self.graphs = []
            case Again():
                if op.removes:
                    self.remove()
                self.prepare()
                if self.case.flat:
                    state = self.optimizer.state_dict()
                    self.optimizer = self.make_optimizer()
                    self.optimizer.load_state_dict(state)
            case _:
                super().play(number, op)


def summed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For torch's class, which has no `reduce`."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def in_halves(group: Any, bucket: Any) -> Any:
    """A hook that starts a second collective when the first has landed."""
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    first, *second = buffer.chunk(2)

    def send_second(future: Any) -> torch.Tensor:
        future.value()
        for half in second:
            dist.all_reduce(half, group=group)
        return buffer

    return dist.all_reduce(first, group=group, async_op=True).get_future().then(send_second)


def gathered(group: Any, bucket: Any) -> Any:
    """A hook that sends no sum, and whose average is another tensor."""
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, buffer.mul_(1.0 / len(parts)), group=group, async_op=True)

    def add(future: Any) -> torch.Tensor:
        future.value()
        return sum(parts[1:], parts[0])

    return work.get_future().then(add)


HOOKS = {
    "allreduce_hook": ddp.comm_hooks.allreduce_hook,
    "torch's allreduce_hook": default_hooks.allreduce_hook,
    "in_halves": in_halves,
    "gathered": gathered,
    # Vectors are sent in float32, and everything is on a single machine.
    "int8_blockwise": ddp.comm_hooks.int8_blockwise,
}


@dataclass
class Played:
    states: list[dict[str, list[Any]]]
    error: str | None = None
    recovered: bool = True
    faults: list[str] = field(default_factory=list)


def play(world: Any, case: Case, as_torch: bool, together: bool) -> tuple[Played, Played | None]:
    """Plays the case on this rank; with torch's class, too, if `as_torch`."""
    group = dist.new_group(timeout=timedelta(seconds=DIVIDED_LIMIT_S)) if case.divided else None
    with watched(world.device) as faults, as_large() if case.large else nullcontext():
        model = Net(case, world.rank, world.device)
        player = Ours(case, world.rank, model, group)
        played = _play(player)
    played.faults = faults
    if played.error is not None and together:
        player.remove()
        played.recovered = _trains_on(world, case, model)
    dist.barrier()
    if not as_torch:
        return played, None
    return played, _play(Torchs(case, world.rank, Net(case, world.rank, world.device)))


@contextmanager
def watched(device: torch.device) -> Iterator[list[str]]:
    """Finds what a simulated GPU sees in the `with` block. A no-op for other devices."""
    faults: list[str] = []
    if device.type != "cuda" or "tests.support.simgpu.device" not in sys.modules:
        yield faults
        return
    from tests.support.simgpu import device as simulated
    from tests.support.simgpu import trace

    simulated.clear()
    torch.__future__.set_overwrite_module_params_on_conversion(False)  # keeps shared parameters
    try:
        yield faults
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
    faults += trace.faults() + trace.unexpected_waits()


def _play(player: Player) -> Played:
    played = Played([])
    for number, op in enumerate(player.case.operations):
        try:
            player.play(number, op)
        except Exception as error:  # noqa: BLE001  # the oracle says which are right
            played.error = f"{type(error).__name__}: {error}"
            break
        played.states.append(player.state())
    return played


def _trains_on(world: Any, case: Case, model: Net) -> bool:
    """Whether a new Reducer averages what the ranks compute."""
    model.eval().requires_grad_()  # buffers stay
    model.checkpoint = None  # which may want a static graph
    if model.case.buffers:
        model.grown = model.grown.new_zeros(1)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, find_unused_parameters=True)
    player = Player(case, world.rank, model)
    gradients = []
    for _ in range(2):
        for op in (Zero(), Forward((case.everything,) * case.world_size), Backward()):
            player.play(0, op)
        found = [p.grad for p in player.parameters if p.grad is not None]
        gradients.append([gradient.resolve_conj() for gradient in found])
        reducer.remove()
    for gradient in gradients[1]:
        gradient /= world.world_size
        dist.all_reduce(gradient)
    return all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(*gradients, strict=True))
