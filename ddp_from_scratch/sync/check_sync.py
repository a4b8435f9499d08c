"""Compares parameters and optimizer state over ranks, bit for bit; names the first difference."""

import hashlib
import math
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.group import (
    check_group,
    gather_objects,
    on_gpu_of,
    takes_cpu_tensors,
    wait,
)
from ddp_from_scratch.core.extension import Extension

_WORDS = 2**16  # elements of a row
# Knuth's MMIX multiplier. Row sums are multiplied by its powers, so that the order of rows counts.
_FACTOR = 6364136223846793005
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a 64-bit checksum of each dense tensor, of its bits in logical order.

    A sum of integers times odd weights: a change of one element always shows; changes of several
    cancel out at most about once in 2**32 times.
    """
    weights = {device: _weights().to(device) for device in {tensor.device for tensor in tensors}}
    sums = []
    for tensor in tensors:
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        words = values.contiguous().view(-1).view(_INTEGERS[values.element_size()])
        sums.append(_sum(words, weights[tensor.device]))
    # One transfer for each device, not for each tensor.
    rows = {at: iter(torch.stack([s for s in sums if s.device == at]).tolist()) for at in weights}
    return [next(rows[one.device]) for one in sums]


def _sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if len(words) <= _WORDS:
        return (words * weights[: len(words)]).sum()
    # On a CPU one row stays in the cache. On a GPU, kernel launches dominate.
    rows = 256 if gpu.is_gpu(words.device) else 1
    sums = []
    for part in words.split(rows * _WORDS):
        rest = len(part) % _WORDS
        if rest < len(part):
            sums.append((part[: len(part) - rest].view(-1, _WORDS) * weights).sum(1))
        if rest:
            sums.append((part[-rest:] * weights[:rest]).sum().view(1))
    of_rows = torch.cat(sums)
    return (of_rows * torch.full_like(of_rows, _FACTOR).cumprod(0)).sum()


def _weights() -> torch.Tensor:
    """Returns odd numbers, the same on every rank and in every version of torch."""
    numbers = torch.arange(1, _WORDS + 1, dtype=torch.int64, device="cpu")
    # Spreads the bits of small numbers over all 64.
    for shift in (29, 32):
        numbers = numbers * _FACTOR
        numbers = numbers ^ (numbers >> shift)
    # Odd factors have inverses modulo 2**64, so no change of one element can vanish.
    return numbers | 1


# N: a check in every Nth average, if forward passes write to parameters.
EVERY_AFTER_WRITES = 100
WRITTEN = (
    "Forward passes write to parameters, so ranks are compared: write to them after the step, "
    "equally on all ranks, or keep values that depend on a rank's data in a buffer; and do not "
    "step on gradients that are not averaged"
)

NOT_SENT = "Call ddp.broadcast_parameters(model) on every rank, before the first step"

Mark = tuple[str, int]  # (dtype and shape, checksum) of a tensor


def check_sync(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    ignore: Collection[str] = (),
) -> str:
    """Compares all ranks' parameters, and optimizer state for them, bit for bit. Collective.

    Equal ranks exchange 16 bytes each, others a checksum of every tensor and the first difference.

    Args:
        module: its parameters are compared.
        process_group: the ranks that take part; None means all.
        optimizers: their state for these parameters is compared, too: tensors and numbers, also in
            lists and dicts. Shards are compared among the ranks that hold them; with shard="world"
            there is one each.
        ignore: names of parameters that are left out.

    Returns:
        A checksum of all parameters as 16 hexadecimal digits, the same on every rank.

    Raises:
        RuntimeError: something differs between ranks. The text, the same on every rank, names the
            first parameter or part of a state that differs, the ranks, and the largest absolute
            difference.
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

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers[optimizer] = None

    def on_set_step(self) -> None:
        self._optimizers.clear()  # on ranks that join, no optimizer has stepped yet

    def on_all_launched(self) -> RuntimeError | None:
        # Every rank takes part in an average, but one rank may run forward or step alone. And no
        # parameter has changed yet, as it may later during an average (`backward_and_step`).
        reducer = self._of()
        iteration, is_due, self._is_due = reducer.iteration + 1, self._is_due, False
        if not is_due and iteration % self._every:
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
    """This rank's tensors and their checksums, by the names that errors use."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        ignore: Collection[str],
    ) -> None:
        named = [(name, p) for name, p in module.named_parameters() if name not in ignore]
        self.tensors: dict[str, torch.Tensor] = {f"parameter {name}": p for name, p in named}
        self.of_parameters = len(self.tensors)  # parameters come first
        for number, optimizer in enumerate(optimizers):
            whose = "the optimizer" if number == 0 else f"optimizer {number + 1}"
            divided = getattr(optimizer, "shard", "none") == "world"  # each rank has its own part
            if divided:
                optimizer.synchronize()  # type: ignore[attr-defined]  # parameters may be under way
            for name, parameter in named if not divided else ():
                for key, value in _values(optimizer.state.get(parameter)):
                    self.tensors[f"{key} in the state of {whose} for parameter {name}"] = value
        numbers = checksums(list(self.tensors.values()))
        self.marks: dict[str, Mark] = {
            label: (f"{tensor.dtype} {tuple(tensor.shape)}", number)
            for (label, tensor), number in zip(self.tensors.items(), numbers, strict=True)
        }

    def digest(self, count: int | None = None) -> bytes:
        """Returns 8 bytes for the first `count` tensors; None means all."""
        return hashlib.sha256(repr(list(self.marks.items())[:count]).encode()).digest()[:8]


def _values(state: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        if state.layout == torch.strided:
            yield key, state
    elif isinstance(state, (bool, int, float)):
        yield key, torch.tensor(state, dtype=torch.float64, device="cpu")
    elif isinstance(state, (dict, list, tuple)):
        for inner, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _values(value, f"{key}.{inner}" if key else str(inner))


def _compare(held: _Held | None, process_group: dist.ProcessGroup | None, when: str) -> str:
    digest = 0 if held is None else int.from_bytes(held.digest(), "little", signed=True)
    everyone = gather_integers([int(held is not None), digest], process_group)
    found = {digest for takes_part, digest in everyone if takes_part}
    if len(found) > 1:
        _find_difference(held, process_group, when)
    return "" if held is None else held.digest(held.of_parameters).hex()


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
        if len(set(kinds.values())) > 1:
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
    values = None if tensor is None else tensor.detach().cpu()
    sent = [values if rank == first else None]
    dist.broadcast_object_list(sent, group=process_group, group_src=first)
    mine = 0.0
    if rank in differ and values is not None and sent[0] is not None:
        wide = torch.complex128 if values.is_complex() else torch.float64
        mine = (values.to(wide) - sent[0].to(wide)).abs().max().item()
    # Every rank gets every distance, so that all raise the same text.
    everyone = gather_objects(mine, process_group)
    return math.nan if any(math.isnan(one) for one in everyone) else max(everyone)
