"""Gives every rank the state and the settings of one rank's optimizer.

rank src      state_dict()  ->  tensors by tree   |  the rest pickled
other ranks                     into new tensors  |  ->  load_state_dict()
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.arguments import check_src
from ddp_from_scratch.common.group import gather_objects, takes_cpu_tensors
from ddp_from_scratch.common.memory import dense_strides
from ddp_from_scratch.sync.broadcast import send_tensors
from ddp_from_scratch.sync.check_sync import is_zero
from ddp_from_scratch.sync.checksums import dense_parts


class _Described(NamedTuple):
    """What stands for a tensor in the pickled state."""

    value: torch.Tensor | None  # None if it comes in a message
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    like_parameter: bool  # a subclass of torch.Tensor, such as DTensor

    def make(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or memory for it."""
        if self.like_parameter:
            return torch.empty_like(parameter).detach()
        device = torch.device("cpu") if self.on_cpu else parameter.device
        if self.value is not None:
            return self.value.to(device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    src: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Gives every rank the state and settings of rank `src`'s optimizer, bit for bit. Collective.

    All ranks first compare their optimizers. Rank `src`'s state then replaces the others': entries
    that they lack are created, and entries that `src` lacks are dropped. Settings are those of the
    parameter groups, such as the learning rate. With shard="world" every rank then has the state
    that `state_dict()` returns on rank `src`, and keeps only its share from the next step on.

    Args:
        optimizer: one of torch's, one of this library's with any `shard`, or your own if its
            `load_state_dict` takes the `state_dict` of another rank.
        src: the rank, within the group, to copy from.
        process_group: the ranks that take part; None means all.

    Raises:
        ValueError: `src` is not a rank of the group, or the optimizer is torch's
            ZeroRedundancyOptimizer, of which each rank has another part.
        RuntimeError: the optimizers differ in class, `shard`, number of groups or parameters, or in
            shapes or dtypes of parameters; the text names the first difference and the two ranks.
            Or the state cannot be pickled, or `state_dict()`, `load_state_dict()` or one of their
            hooks raises on a rank. The text is the same on every rank.
    """
    check_src(src, process_group)
    parameters = _parameters(optimizer)
    first = parameters[0].device if parameters else torch.device("cpu")
    with gpu.current(first):  # for nccl's object collectives
        _check_same_optimizer(optimizer, process_group)
        is_src = dist.get_rank(process_group) == src
        messages, blob = list[torch.Tensor](), b""
        with _together("the optimizer's state cannot be sent", process_group):
            # Of a divided state all ranks have a part, so all must call.
            if is_src or getattr(optimizer, "shard", "none") == "world":
                packed = optimizer.state_dict()
            if is_src:
                inline = not takes_cpu_tensors(process_group)
                blob = pickle.dumps(_replace(packed, _describe(messages, inline)))
        sent: list[Any] = [blob]
        dist.broadcast_object_list(sent, group=process_group, group_src=src)
        refused = f"the state of rank {src}'s optimizer cannot be loaded"
        with _together(refused, process_group):
            if not is_src:
                loaded = _restore(pickle.loads(sent[0]), parameters, messages)
        send_tensors(messages, src, process_group)
        with _together(refused, process_group):
            if not is_src:
                _load(optimizer, parameters, loaded)
    if hasattr(optimizer, "forget_loaded"):  # a `FlatOptimizer`, which would compare ranks' loads
        optimizer.forget_loaded()


@contextmanager
def _together(problem: str, process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raises on all ranks if the block, which may run a program's hooks, raises on one.

    Otherwise the others would wait for this one. Collective.
    """
    text, cause = "", None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # all ranks raise it
        cause, why = error, " ".join(str(error).split())
        text = f"{problem}: rank {dist.get_rank(process_group)} has {type(error).__name__}: {why}"
    if first := next(filter(None, gather_objects(text, process_group)), ""):
        raise RuntimeError(first) from cause


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_same_optimizer(
    optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None
) -> None:
    everyone = gather_objects(_traits(optimizer), process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip_longest(everyone[0], theirs, fillvalue="nothing more")
            zero, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(f"the optimizers differ: rank 0 has {zero}; rank {rank} has {other}")
    if is_zero(optimizer):
        raise ValueError(
            "each rank has its own part of a ZeroRedundancyOptimizer's state, which cannot be "
            "broadcast: load a consolidated state_dict() on every rank"
        )


def _traits(optimizer: torch.optim.Optimizer) -> list[str]:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    lines = [f"a {kind}", f'shard="{getattr(optimizer, "shard", "none")}"']
    for index, group in enumerate(optimizer.param_groups):
        lines.append(f"{len(group['params'])} parameters in group {index}")
        for parameter in group["params"]:
            of = f"shape {tuple(parameter.shape)} and {parameter.dtype}"
            lines.append(f"a parameter of {of} in group {index}")
    return lines


def _replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of dicts, lists and tuples in which `change` has replaced the values."""
    if isinstance(value, dict):
        return {key: _replace(inner, change) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(inner, change) for inner in value)
    return change(value)


def _describe(messages: list[torch.Tensor], inline: bool) -> Callable[[Any], Any]:
    """Returns a function that describes tensors, and adds those for a message to `messages`.

    `inline`: the group sends no tensors of a CPU.
    """

    def describe(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        subclass = hasattr(type(value), "__tensor_flatten__")
        dense = value.layout is torch.strided and not value.is_quantized
        small = not subclass and (value.numel() <= 1 or not dense or (value.is_cpu and inline))
        if not small:
            messages.extend(dense_parts(value))
        strides = dense_strides(value) if dense and not subclass else ()
        copied = value.detach().cpu().clone() if small else None
        return _Described(copied, value.shape, strides, value.dtype, value.is_cpu, subclass)

    return describe


def _restore(
    packed: dict[str, Any], parameters: list[torch.Tensor], messages: list[torch.Tensor]
) -> dict[str, Any]:
    """Returns the state with a tensor for each description, and adds those to be received."""

    def make_for(parameter: torch.Tensor) -> Callable[[Any], Any]:
        def make(value: Any) -> Any:
            if not isinstance(value, _Described):
                return value
            made = value.make(parameter)
            if value.value is None:
                messages.extend(dense_parts(made))
            return made

        return make

    restored = dict[str, Any]()
    for key, value in packed.items():  # in the order in which `_describe` went through them
        if key == "state":
            owners = {i: parameters[i] if isinstance(i, int) else parameters[0] for i in value}
            restored[key] = {i: _replace(value[i], make_for(owners[i])) for i in value}
        else:
            restored[key] = _replace(value, make_for(parameters[0]))
    return restored


def _load(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], loaded: dict[str, Any]
) -> None:
    optimizer.load_state_dict(loaded)
    # torch casts state to the dtype of its parameter, and rank `src`'s may have another one.
    for index, state in loaded["state"].items():
        # What is not of a parameter, torch loads as it is.
        held = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in state.items() if isinstance(state, dict) and held else ():
            is_cast = isinstance(value, torch.Tensor) and value.dtype != held[key].dtype
            if is_cast or isinstance(value, (list, tuple, dict)):
                held[key] = value
