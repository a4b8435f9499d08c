"""Compares parameters and optimizers over ranks, bit for bit; names the first difference."""

import hashlib
import math
import sys
import weakref
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.common.arguments import check_ignore, check_whole
from ddp_from_scratch.common.group import (
    check_group,
    gather_objects,
    on_gpu_of,
    takes_cpu_tensors,
    wait,
)
from ddp_from_scratch.core.observer import Check
from ddp_from_scratch.sync.checksums import checksums, dense_parts, kind_of

# N: a check in every Nth average, if forward passes write to parameters.
EVERY_AFTER_WRITES = 100
WRITTEN = (
    "Forward passes write to parameters, so ranks are compared: write to them after the step, "
    "equally on all ranks, or keep values that depend on a rank's data in a buffer; and do not "
    "step on gradients that are not averaged"
)

NOT_SENT = "Call ddp.broadcast_parameters(model) on every rank, before the first step"

# (dtype and shape, checksum) of a tensor; (text, 0) of a setting.
Mark = tuple[str, int]

# What the name of a gradient ends with.
_STEPPED = " in the last step of the optimizer"
# Keys of a parameter group that are not compared.
_NO_SETTINGS = ("params", "param_names")
# Not torch.device, since ranks have GPUs of their own.
_PLAIN = (bool, complex, str, bytes, Enum, torch.dtype, torch.layout, torch.memory_format)
_LONG = 200  # characters of a text


def check_sync(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    ignore: Collection[str] = (),
) -> str:
    """Compares all ranks' parameters and their optimizers, bit for bit. Collective.

    If all ranks are equal, each sends 16 bytes. Otherwise they exchange a checksum of every tensor,
    and the first difference.

    Args:
        module: the module whose parameters are compared.
        process_group: the ranks that take part; None means all.
        optimizers: optimizers to compare: their number and classes, the settings of their parameter
            groups, the group of each parameter, and the state of the module's parameters (tensors,
            numbers and texts, also in lists and dicts). Ranks whose optimizer has a parameter must
            have the same state for it. Shards of the state are compared among the ranks that hold
            them; with shard="world" each rank holds another shard.
        ignore: names of parameters to leave out; those of buffers have no effect.

    Returns:
        A checksum of all parameters as 16 hexadecimal digits, the same on every rank.

    Raises:
        RuntimeError: something differs between ranks. The text, the same on every rank, names the
            first setting, parameter or part of a state that differs, the ranks, and both values or
            the largest absolute difference.
        TypeError: `ignore` is a text, or `optimizers` an optimizer, instead of a list.
    """
    check_group(process_group)
    ignore = check_ignore(ignore, module)
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(
            f"optimizers must be a list of optimizers, got {type(optimizers).__name__}: write "
            f"[optimizer]"
        )
    with on_gpu_of(module):
        named = {
            "the optimizer" if n == 1 else f"optimizer {n}": o for n, o in enumerate(optimizers, 1)
        }
        held = _Held(module, named, ignore, {"the number of optimizers": (str(len(named)), 0)})
        return _compare(held, process_group, "")


class DriftCheck(Check):
    """Runs `check_sync` in every Nth average of a Reducer, on the result of the last step.

    With `advice`, which ends the error, the next average is checked, too.
    """

    def __init__(
        self,
        every: int,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        ignore: Collection[str],
        advice: str = "",
    ) -> None:
        check_whole("check_every", every)
        if every < 1:
            raise ValueError(f"check_every must be 1 or more, got {every}")
        self._every, self._is_due = every, bool(advice)
        self.advice: str = advice
        self._module, self._process_group, self._ignore = module, process_group, ignore
        # Those that have stepped since the last check, by their last steps. Weak, so that a check
        # does not keep an optimizer alive.
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, None]()

    @property
    def is_due(self) -> bool:
        """True if the next average compares ranks."""
        return self._is_due or (self._reducer().iteration + 1) % self._every == 0

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.pop(optimizer, None)
        self._optimizers[optimizer] = None

    def on_set_step(self) -> None:
        self._optimizers.clear()  # on ranks that join, no optimizer has stepped yet

    def verdict(self) -> RuntimeError | None:
        # Every rank takes part in an average, but one rank may run forward or step alone. And no
        # parameter has changed yet, as it may later during an average (`backward_and_step`).
        reducer, is_due, self._is_due = self._reducer(), self.is_due, False
        iteration = reducer.iteration + 1
        if not is_due:
            return None
        plan = reducer.average.plan
        has_no_data = reducer.joining and plan is not None and plan.sends_zeros  # not compared
        with on_gpu_of(self._module):
            stepped = list(self._optimizers)
            optimizers = _by_what_they_step(self._module, stepped) if stepped else {}
            self._optimizers.clear()
            held = None if has_no_data else _Held(self._module, optimizers, self._ignore)
            try:
                _compare(held, self._process_group, f"average {iteration}: ")
            except RuntimeError as error:
                return RuntimeError(f"{error}. {self.advice}") if self.advice else error
        return None


def _by_what_they_step(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.optim.Optimizer]:
    """Returns optimizers by names that are the same on every rank; of equal names the last.

    Not by number: one rank may keep an optimizer that others have dropped.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    found = {}
    for optimizer in optimizers:
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        stepped = sorted(names[one] for one in ids if one in names)
        whose = "the optimizer"
        if not trained.issubset(stepped):
            among = f"{stepped[0]} to {stepped[-1]}, {len(stepped)} in all" if stepped else "others"
            whose = f"the {type(optimizer).__name__} of {among}"
        found[whose] = optimizer
    return {whose: found[whose] for whose in sorted(found)}


class _Held:
    """This rank's tensors and settings, and their marks, by the names that errors use."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        ignore: Collection[str],
        marks: Mapping[str, Mark] | None = None,
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if name not in ignore}
        self.tensors: dict[str, torch.Tensor]
        self.tensors = {f"parameter {name}": p for name, p in named.items()}
        self.parameters: list[str] = list(self.tensors)
        # Causes come first, since an error names one difference.
        self.marks: dict[str, Mark] = dict(marks or {})
        states: dict[str, Mark] = {}
        for whose, optimizer in optimizers.items():
            self._hold_settings(whose, optimizer, named)
            self._hold(whose, optimizer, named, states)
        numbers = checksums(list(self.tensors.values()))
        for (label, tensor), number in zip(self.tensors.items(), numbers, strict=True):
            self.marks[label] = kind_of(tensor), number
        self.marks |= states

    def _hold_settings(
        self, whose: str, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
    ) -> None:
        names, groups = {id(p): name for name, p in named.items()}, optimizer.param_groups
        self.marks[f"the class of {whose}"] = type(optimizer).__qualname__, 0
        for index, group in enumerate(groups):
            for name in filter(None, (names.get(id(p)) for p in group["params"])):
                self.marks[f"the group of {name} in {whose}"] = str(index), 0
        for index, group in enumerate(groups):
            if names.keys().isdisjoint(map(id, group["params"])):
                continue
            where = f"group {index} of {whose}" if len(groups) > 1 else whose
            for key, value in group.items():
                if key not in _NO_SETTINGS and (text := setting_text(value)) is not None:
                    self.marks[f"{key} of {where}"] = text, 0

    def _hold(
        self,
        whose: str,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
        states: dict[str, Mark],
    ) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        divided = getattr(optimizer, "shard", "none") == "world"  # each rank has its own part
        if divided:
            optimizer.synchronize()  # type: ignore[attr-defined]  # parameters may be under way
        gradients = getattr(optimizer, "gradient_marks", {})
        for name, parameter in named.items():
            if parameter in gradients:
                self.marks[f"the gradient of {name}{_STEPPED}"] = gradients[parameter]
            if id(parameter) not in stepped:
                continue
            state = dict(_values(optimizer.state.get(parameter)))
            end = f"the state of {whose} for parameter {name}"
            if not is_zero(optimizer):
                states[end] = ", ".join(map(str, state)) or "nothing", 0
            for key, value in state.items():
                if isinstance(value, str):
                    states[f"{key} in {end}"] = value, 0
                elif not divided or key == "step":
                    self.tensors[f"{key} in {end}"] = value

    def digest(self, labels: Collection[str] | None = None) -> bytes:
        """Returns 8 bytes for what has these labels; None means all."""
        rows = [row for row in self.marks.items() if labels is None or row[0] in labels]
        return hashlib.sha256(repr(rows).encode()).digest()[:8]


def setting_text(value: Any) -> str | None:
    """Returns an exact text of a setting, equal for equal numbers; None if it has no text."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.layout is torch.strided and not value.is_meta:
            return setting_text(value.item())
        return f"{kind_of(value)} with checksum {checksums([value])[0]:x}"
    if isinstance(value, Number) and not isinstance(value, (bool, complex)):
        return repr(float(value))  # type: ignore[arg-type]  # a number of numpy, or an int
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return _short(f"({', '.join(str(setting_text(one)) for one in value)})")
    if isinstance(value, dict):
        return _short(f"{{{', '.join(f'{k}: {setting_text(v)}' for k, v in value.items())}}}")
    if isinstance(value, (set, frozenset)):
        return _short(f"{{{', '.join(sorted(str(setting_text(one)) for one in value))}}}")
    if hasattr(value, "__array__") and hasattr(value, "tolist"):  # an array of numpy, or its bool
        return setting_text(value.tolist())
    return None


def _short(text: str) -> str:
    checksum = f"... with checksum {zlib.crc32(text.encode()):x}"
    return text if len(text) <= _LONG else text[: _LONG // 2] + checksum


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's ZeroRedundancyOptimizer, where a rank lacks the state that others have."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _values(state: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor | str]]:
    """Returns tensors and numbers as tensors, and other values as texts, by their place."""
    if isinstance(state, torch.Tensor):
        yield key, state
    elif isinstance(state, Number):
        wide = torch.complex128 if isinstance(state, complex) else torch.float64
        yield key, torch.tensor(state, dtype=wide, device="cpu")
    elif isinstance(state, (dict, list, tuple)):
        for inner, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _values(value, f"{key}.{inner}" if key else str(inner))
    elif state is not None and (text := setting_text(state)) is not None:
        yield key, text


def _compare(held: _Held | None, process_group: dist.ProcessGroup | None, when: str) -> str:
    digest = 0 if held is None else int.from_bytes(held.digest(), "little", signed=True)
    everyone = gather_integers([int(held is not None), digest], process_group)
    found = {digest for takes_part, digest in everyone if takes_part}
    if len(found) > 1:
        _find_difference(held, process_group, when)
    return "" if held is None else held.digest(held.parameters).hex()


def gather_integers(
    mine: Sequence[int], process_group: dist.ProcessGroup | None
) -> list[list[int]]:
    """Returns every rank's integers, by rank. All ranks give equally many. Collective."""
    # gloo takes CPU tensors even if the model is on a GPU; nccl does not.
    device = "cpu" if takes_cpu_tensors(process_group) else "cuda"
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(process_group))]
    wait(dist.all_gather(gathered, sent, group=process_group, async_op=True))
    return torch.stack(gathered).tolist()


def _find_difference(
    held: _Held | None, process_group: dist.ProcessGroup | None, when: str
) -> None:
    """Raises on every rank, unless ranks only hold different parts of a sharded state."""
    # All ranks get all marks, so all raise the same error.
    everyone: list[dict[str, Mark] | None]
    everyone = gather_objects(None if held is None else held.marks, process_group)
    for label in dict.fromkeys(label for marks in everyone for label in marks or ()):
        marks = {
            rank: theirs.get(label)
            for rank, theirs in enumerate(everyone)
            # Every rank must hold each parameter, but not each part of a (sharded) state.
            if theirs is not None and (label in theirs or label.startswith("parameter "))
        }
        first, mark = next(iter(marks.items()))
        differ = [rank for rank, theirs in marks.items() if theirs != mark]
        if not differ:
            continue
        kinds = {rank: theirs[0] if theirs else "missing" for rank, theirs in marks.items()}
        if label.endswith(_STEPPED):  # the gradient itself is gone
            how = ": it was changed between backward() and step(), or not averaged"
        elif len(set(kinds.values())) > 1:
            how = f": {kinds[first]} there, {kinds[differ[0]]} on rank {differ[0]}"
        else:
            tensor = None if held is None else held.tensors.get(label)
            how = f" by up to {_distance(tensor, first, differ, process_group):.3g}"
        raise RuntimeError(
            f"{when}{label} is not the same on all ranks: {differ} differ from rank {first}{how}"
        )


@torch.no_grad()
def _distance(
    tensor: torch.Tensor | None,
    first: int,
    differ: list[int],
    process_group: dist.ProcessGroup | None,
) -> float:
    """Returns the largest absolute difference from rank `first`'s values. Collective."""
    rank = dist.get_rank(process_group)
    # Every backend can send pickled objects. They are slow, but the run ends here.
    values = None if tensor is None else [part.cpu() for part in dense_parts(tensor)]
    sent = [values if rank == first else None]
    dist.broadcast_object_list(sent, group=process_group, group_src=first)
    mine = 0.0
    if rank in differ and values is not None and sent[0] is not None:
        furthest = [0.0, *map(_furthest, values, sent[0])]
        mine = (
            torch.tensor(furthest, dtype=torch.float64, device="cpu").max().item()
        )  # nan if one is
    # Every rank gets every distance, so that all raise the same text.
    everyone = gather_objects(mine, process_group)
    return math.nan if any(math.isnan(one) for one in everyone) else max(everyone)


def _furthest(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf  # sparse tensors have other places
    wide = torch.complex128 if one.is_complex() else torch.float64
    return (one.to(wide) - other.to(wide)).abs().max().item() if one.numel() else 0.0
