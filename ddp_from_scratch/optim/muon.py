"""Muon with its matrices divided over the ranks.

Muon replaces the momentum of a matrix by a nearly orthogonal matrix, which takes 15 products of
matrices. All ranks have the same averaged gradients, so each does that for its own matrices alone
and broadcasts the results in one message:

    rank 0   orthogonalize m0, m3  |  send m0, m3  | receive m1, m2 |  update all
    rank 1   orthogonalize m1, m2  | receive m0, m3 |  send m1, m2  |  update all

All ranks keep the momentum of all matrices, which is cheap to compute. So `state_dict()` is whole
on every rank, and a lost rank takes nothing with it.
"""

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from ddp_from_scratch.common.group import gather_objects, wait
from ddp_from_scratch.common.memory import overlapping
from ddp_from_scratch.core.wrapped import reducer_of
from ddp_from_scratch.optim.shard_policy import check_averages
from ddp_from_scratch.optim.unflattened import Unflattened
from ddp_from_scratch.optim.update_rules import ADAM_RULE, check_state
from ddp_from_scratch.reducer import Reducer
from ddp_from_scratch.sync.check_sync import setting_text

DTYPES = (torch.bfloat16, torch.float32, torch.float64)

NS = ("ns_coefficients", "ns_steps", "eps")  # the settings of `orthogonalize`

# A parameter, its gradient and its group.
Row = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with its work divided among ranks, and AdamW for all but hidden matrices.

    AdamW steps groups with `use_muon=False` (embeddings, heads, norms, biases) on every rank. These
    groups take the settings of torch.optim.AdamW, with its defaults, and need their own learning
    rate:

        hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = ...
        groups = [{"params": hidden, "lr": 0.02}, {"params": others, "lr": 1e-3, "use_muon": False}]
        optimizer = ddp.Muon(groups, reducer=reducer)

    Each matrix belongs to one rank, and all ranks use that rank's result, so they stay bitwise
    identical. State and parameter groups have the form of torch's classes, and each loads the
    other's. If a step raises because a rank was lost, it has changed nothing. Inside `join()`, and
    in a copy of the optimizer (deep or pickled), each rank computes all matrices.

    Args:
        params: parameters or groups. Those without `use_muon=False` must be real matrices (2-D).
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: defaults
            for groups that do not set their own, as in torch.optim.Muon.
        reducer: averages the gradients over the ranks that share the work; a
            `ddp.DistributedDataParallel` stands for its own.
        ns_dtype: the dtype of Newton-Schulz iterations and of the results that ranks send: one of
            `DTYPES`. None is bfloat16 on GPUs and on CPUs that multiply bfloat16 matrices in
            hardware, else float32. With bfloat16 the bits are those of torch.optim.Muon.

    Raises:
        TypeError: a setting that chooses a kernel (`foreach`, `fused`, `capturable`,
            `differentiable`).
        ValueError: a value out of range, as in torch's classes; a parameter is not a real matrix.
        RuntimeError: from a step, which has changed nothing: a gradient is sparse, the Reducer was
            removed, or the ranks differ in `ns_dtype` or, on CPUs, in a setting of a group.

    Follows: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), and
    torch/optim/_muon.py.
    """

    # The parameters that AdamW steps, and the groups that they were collected from. Not copied.
    _others: Sequence[Unflattened] = ()
    _arranged_for: Any = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        reducer: Reducer,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            **{"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov},
            **{"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps},
            "adjust_lr_fn": adjust_lr_fn,
        }
        reducer = reducer_of(reducer)
        self._reducer: Reducer | None = reducer  # None in a copy
        self._compared: Callable[[], Any] = NoneType  # returns the group that has one `ns_dtype`
        self.ns_dtype: torch.dtype = ns_dtype or fastest_dtype(reducer.core.device)
        if self.ns_dtype not in DTYPES:
            raise ValueError(f"ns_dtype must be one of {DTYPES} or None, got {ns_dtype}")
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; those without `use_muon=False` must hold matrices. Raises as the class."""
        group = {"use_muon": True} | param_group
        for name in ("foreach", "fused", "capturable", "differentiable"):
            if name in group:
                raise TypeError(f"Muon takes no {name}: it has one kernel")
        kind: Any = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
        # With `fused`, torch's AdamW has the same bits after it loads the group.
        settings = self._settings if group["use_muon"] else {"fused": True}
        given = {n: group[n] for n in inspect.signature(kind).parameters if n in group}
        # torch's class checks the values and adds its defaults; the parameters are checked below.
        some = [torch.empty(1, 1, dtype=torch.float32, device="cpu")]
        (checked,) = kind(**settings | given | {"params": some}).param_groups
        super().add_param_group(checked | group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        matrices = group["params"] if group["use_muon"] else []
        for parameter in group["params"]:
            if parameter.is_complex() or (group["use_muon"] and parameter.ndim != 2):
                raise ValueError(
                    f"Muon takes real matrices, got a parameter of shape {tuple(parameter.shape)} "
                    f"and {parameter.dtype}: give it to a group with use_muon=False, which takes "
                    f"real parameters of any shape"
                )
        if self._reducer is not None:
            averaged = {id(parameter) for parameter in self._reducer.core.parameters}
            for parameter in matrices:
                if parameter.requires_grad and id(parameter) not in averaged:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is not one of the "
                        f"reducer's: ranks would share its update, but not its gradient"
                    )
        if matrices and len(group["ns_coefficients"]) != 3:
            raise ValueError(
                f"ns_coefficients must be three numbers, got {group['ns_coefficients']}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, of torch.optim.Muon or of torch.optim.AdamW.

        Raises a ValueError where a saved group and this one are not both of Muon or both of AdamW,
        or a saved group lacks settings.
        """
        ours = [group["use_muon"] for group in self.param_groups]
        saved = ["ns_steps" in group for group in state_dict["param_groups"]]
        if saved != ours:
            raise ValueError(f"the state has groups with use_muon={saved}, the optimizer {ours}")
        for group, is_muon in zip(state_dict["param_groups"], saved, strict=True):
            required = self._settings if is_muon else ADAM_RULE.required
            if missing := [name for name in required if name not in group]:
                raise ValueError(
                    f"a parameter group that is loaded lacks {', '.join(missing)}: groups with "
                    f"use_muon={is_muon} are those of torch.optim.{'Muon' if is_muon else 'AdamW'}"
                )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["use_muon"] = "ns_steps" in group  # torch's groups lack it

    def __getstate__(self) -> dict[str, Any]:
        own = {"_reducer": None, "_settings": self._settings, "ns_dtype": self.ns_dtype}
        return super().__getstate__() | own

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters with their `.grad`; `closure` and the result are as in torch.

        Collective. The same parameters must have gradients on all ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [
            (parameter, parameter.grad, group)
            for group in self.param_groups
            if group["use_muon"]
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        updates = self._updates(matrices)
        # Nothing has changed so far: an elastic run repeats a step in which a rank was lost.
        for (parameter, gradient, group), update in zip(matrices, updates, strict=True):
            self.state[parameter]["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            rate = float(group["lr"])
            parameter.mul_(1 - rate * group["weight_decay"])
            factor = scale(group["adjust_lr_fn"], *parameter.shape)
            parameter.add_(update, alpha=-rate * factor)
        self._arrange_others()
        for others in self._others:
            others.step(self.state, self.param_groups[others.group])
        return loss

    def _arrange_others(self) -> None:
        """Collects the parameters that AdamW steps, if groups have changed. Idempotent."""
        groups = [[*map(id, group["params"])] for group in self.param_groups]
        if groups != self._arranged_for:
            shared = overlapping([p for group in self.param_groups for p in group["params"]])
            self._others = [
                Unflattened(group["params"], index, ADAM_RULE, shared)
                for index, group in enumerate(self.param_groups)
                if not group["use_muon"]
            ]
            self._arranged_for = groups

    def _updates(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Returns the update of each matrix, computed by its owner. Collective."""
        ranks, rank, size = None, 0, 1
        if self._reducer is not None and not self._reducer.core.joining:
            check_averages(self._reducer, "Muon")
            ranks = self._reducer.core.comm.open_group()
            rank, size = ranks.rank(), ranks.size()
            self._compare_dtypes(ranks, self._reducer.core.device)
        if not rows:
            return []
        if size == 1:
            # Before the first update: a gradient that is refused leaves all as it was.
            buffers = [self._buffer(parameter, gradient) for parameter, gradient, _ in rows]
            pairs = zip(buffers, rows, strict=True)
            return [self._update(buffer, gradient, group) for buffer, (_, gradient, group) in pairs]
        owners = divide([cost(parameter.shape) for parameter, _, _ in rows], size)
        # Behind its results each rank sends a checksum of its settings, in the same message.
        text, device = self._settings_text(), rows[0][0].device
        number = zlib.crc32(text.encode())
        end = torch.full((1,), number, dtype=torch.int64, device=device).view(self.ns_dtype)
        numels: list[list[int]] = [[] for _ in range(size)]
        for (parameter, _, _), owner in zip(rows, owners, strict=True):
            numels[owner].append(parameter.numel())
        for each in numels:
            each.append(end.numel())
        # One message from each rank: with many small ones, sending would outweigh the products.
        messages = [torch.empty(sum(each), dtype=self.ns_dtype, device=device) for each in numels]
        parts = [iter(m.split(each)) for m, each in zip(messages, numels, strict=True)]
        updates = []
        for (parameter, gradient, group), owner in zip(rows, owners, strict=True):
            buffer = self._buffer(parameter, gradient)
            update = next(parts[owner]).view(parameter.shape)
            if owner == rank:
                update.copy_(self._update(buffer, gradient, group))
            updates.append(update)
        ends = [next(each) for each in parts]
        ends[rank].copy_(end)
        works = [
            dist.broadcast(message, group=ranks, group_src=owner, async_op=True)
            for owner, message in enumerate(messages)
        ]
        for work in works:
            wait(work)
        self._compare_settings(text, torch.stack(ends).view(torch.int64).flatten())
        return updates

    def _buffer(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the momentum of a matrix, zeros before its first step."""
        if gradient.is_sparse:
            raise RuntimeError("Muon takes no sparse gradients: use an embedding's dense ones")
        state = self.state[parameter]
        check_state(parameter, state, ("momentum_buffer",))
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer

    def _update(
        self, buffer: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """Returns the update of one matrix; leaves its momentum as it is."""
        momentum = buffer.lerp(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            momentum = gradient.lerp(momentum, group["momentum"])
        # Computed with the longer side as columns, which is cheaper.
        tall = gradient.shape[0] > gradient.shape[1]
        settings = [group[name] for name in NS]
        wide = orthogonalize(momentum.T if tall else momentum, self.ns_dtype, *settings)
        return wide.T if tall else wide

    def _settings_text(self) -> str:
        texts = []
        for group in self.param_groups:
            names = self._settings if group["use_muon"] else ADAM_RULE.settings
            texts.append(", ".join(f"{name}={setting_text(group[name])}" for name in names))
        return "; ".join(texts)

    def _compare_settings(self, text: str, checksums: torch.Tensor) -> None:
        """Raises on all ranks if their settings differ. Collective."""
        # Not on a GPU, for which the host would have to wait.
        if self._reducer is None or not checksums.is_cpu or len(set(checksums.tolist())) == 1:
            return
        texts = gather_objects(text, self._reducer.process_group)
        other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), 0)
        raise RuntimeError(
            f"the settings of Muon differ between ranks: rank 0 has {texts[0]}; rank {other} has "
            f"{texts[other]}: give the same on all"
        )

    def _compare_dtypes(self, ranks: dist.ProcessGroup, device: torch.device) -> None:
        """Raises on all ranks of a new group if `ns_dtype` differs between them. Collective."""
        if self._compared() is ranks:
            return
        number = DTYPES.index(self.ns_dtype)
        ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
        wait(dist.all_reduce(ends, dist.ReduceOp.MAX, group=ranks, async_op=True))
        most, least = ends.tolist()
        if most != -least:
            raise RuntimeError(
                f"ns_dtype is {DTYPES[most]} on some ranks and {DTYPES[-least]} on others: give "
                f"the same ns_dtype on all"
            )
        self._compared = ref(ranks)


def orthogonalize(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    coefficients: Sequence[float],
    steps: int,
    eps: float,
) -> torch.Tensor:
    """Returns about the nearest matrix with orthogonal rows, by Newton-Schulz iterations.

    The matrix must not have more rows than columns. Its singular values come to lie near 1, between
    about 0.7 and 1.2.
    """
    a, b, c = coefficients
    found = matrix.to(dtype, copy=True)
    found.div_(found.norm().clamp(min=eps))  # no singular value is larger than 1
    for _ in range(steps):
        gram = found @ found.T
        change = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, change, found, beta=a)
    return found


def scale(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Returns the factor of the learning rate for a matrix of this shape, as in torch."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1, ratio))


def cost(shape: Sequence[int]) -> int:
    """Returns the multiplications of one Newton-Schulz iteration for a matrix of this shape."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def divide(costs: Sequence[int], size: int) -> list[int]:
    """Returns an owner for each cost: the largest first, to the rank that has least so far."""
    loads, owners = [0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 if the device multiplies matrices of it in hardware, else float32."""
    if device.type != "cpu":
        return torch.bfloat16
    can = torch.cpu.get_capabilities()
    return torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") else torch.float32
