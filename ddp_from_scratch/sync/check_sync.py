"""Compares parameters and optimizers over ranks, bit for bit; names the first difference."""

import hashlib
import math
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.common.group import (
    check_group,
    gather_objects,
    on_gpu_of,
    takes_cpu_tensors,
    wait,
)
from ddp_from_scratch.core.extension import Extension
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


def check_sync(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    ignore: Collection[str] = (),
) -> str:
    """Compares all ranks' parameters, and optimizers of them, bit for bit. Collective.

    Equal ranks exchange 16 bytes each, others a checksum of every tensor and the first difference.

    Args:
        module: its parameters are compared.
        process_group: the ranks that take part; None means all.
        optimizers: the settings of their parameter groups are compared, too, and their state for
            these parameters: tensors and numbers, also in lists and dicts. Ranks whose optimizer
            has a parameter must have the same state for it. Shards of the state are compared among
            the ranks that hold them; with shard="world" there is one each.
        ignore: names of parameters that are left out.

    Returns:
        A checksum of all parameters as 16 hexadecimal digits, the same on every rank.

    Raises:
        RuntimeError: something differs between ranks. The text, the same on every rank, names the
            first setting, parameter or part of a state that differs, the ranks, and both values or
            the largest absolute difference.
    """
    check_group(process_group)
    with on_gpu_of(module):
        return _compare(_Held(module, optimizers, ignore), process_group, "")


class DriftCheck(Extension):
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
        if every < 1:
            raise ValueError(f"check_every must be 1 or more, got {every}")
        self._every, self._is_due = every, bool(advice)
        self.advice: str = advice
        self._module, self._process_group, self._ignore = module, process_group, ignore
        # Weak, so that a check does not keep an optimizer alive. Ordered by their first steps.
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, None]()

    @property
    def is_due(self) -> bool:
        """True if the next average compares ranks."""
        return self._is_due or (self._of().iteration + 1) % self._every == 0

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers[optimizer] = None

    def on_set_step(self) -> None:
        self._optimizers.clear()  # on ranks that join, no optimizer has stepped yet

    def on_all_launched(self) -> RuntimeError | None:
        # Every rank takes part in an average, but one rank may run forward or step alone. And no
        # parameter has changed yet, as it may later during an average (`backward_and_step`).
        reducer, is_due, self._is_due = self._of(), self.is_due, False
        iteration = reducer.iteration + 1
        if not is_due:
            return None
        has_no_data = reducer.joining and reducer.sender.mean == 0  # not compared
        with on_gpu_of(self._module):
            tensors = self._module, list(self._optimizers), self._ignore
            held = None if has_no_data else _Held(*tensors)
            try:
                _compare(held, self._process_group, f"average {iteration}: ")
            except RuntimeError as error:
                return RuntimeError(f"{error}. {self.advice}") if self.advice else error
        return None


class _Held:
    """This rank's tensors and settings, and their marks, by the names that errors use."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        ignore: Collection[str],
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if name not in ignore}
        self.tensors: dict[str, torch.Tensor]
        self.tensors = {f"parameter {name}": p for name, p in named.items()}
        self.parameters: list[str] = list(self.tensors)
        self.marks: dict[str, Mark] = {}  # causes come first, since an error names one difference
        states: dict[str, Mark] = {}
        for number, optimizer in enumerate(optimizers):
            whose = "the optimizer" if number == 0 else f"optimizer {number + 1}"
            self._hold(whose, optimizer, named, states)
        numbers = checksums(list(self.tensors.values()))
        self.marks |= {
            label: (kind_of(tensor), number)
            for (label, tensor), number in zip(self.tensors.items(), numbers, strict=True)
        }
        self.marks |= states

    def _hold(
        self,
        whose: str,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
        states: dict[str, Mark],
    ) -> None:
        ours, groups = {id(p) for p in named.values()}, optimizer.param_groups
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        for index, group in enumerate(groups):
            if ours.isdisjoint(map(id, group["params"])):
                continue
            where = f"group {index} of {whose}" if len(groups) > 1 else whose
            for key, value in group.items():
                if key not in _NO_SETTINGS and (text := setting_text(value)) is not None:
                    self.marks[f"{key} of {where}"] = text, 0
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
                if not divided or key == "step":
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
    if value is None or isinstance(value, (bool, complex, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(str(setting_text(one)) for one in value)})"
    return None


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's ZeroRedundancyOptimizer, where a rank lacks the state that others have."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _values(state: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield key, state
    elif isinstance(state, Number):
        wide = torch.complex128 if isinstance(state, complex) else torch.float64
        yield key, torch.tensor(state, dtype=wide, device="cpu")
    elif isinstance(state, (dict, list, tuple)):
        for inner, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _values(value, f"{key}.{inner}" if key else str(inner))


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
    sent = torch.tensor(mine, device=device)
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
