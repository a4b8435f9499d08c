"""Raises if averages would be missing or wrong, and names the parameter and the rank."""

from collections.abc import Collection, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.errors import AGAIN, shortened
from ddp_from_scratch.group import on_gpu_of
from ddp_from_scratch.sync.check_sync import EVERY_AFTER_WRITES, DriftCheck, gather_integers

# Called for all parameters before every forward pass: without a Python call for each.
_version = attrgetter("_version")
_requires_grad, _dtype, _device = map(attrgetter, ("requires_grad", "dtype", "device"))
# The expensive checks run in the first so many forward passes, and then in every so many.
_OFTEN = 10


class Checks(Extension):
    """Compares the module with what it was, and parameters before and after forward."""

    def __init__(self, snapshot: "ModuleSnapshot", ignore: Collection[str]) -> None:
        self._snapshot, self._ignore = snapshot, ignore
        # Versions of all parameters as the forward pass under way began; None outside of one in
        # training. Writes to `parameter.data` are missed: torch does not count them.
        self._before: list[int] | None = None
        self._written: dict[str, None] = {}  # by forward passes so far
        self._forwards = 0

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        # One rank alone cannot differ from others.
        self._watches_writes = dist.get_world_size(reducer.process_group) > 1
        if self._watches_writes:
            reducer.add_extension(_FirstAverage(self))
            _check_rescaling(reducer.module, self._snapshot.parameters)

    def on_forward(self) -> None:
        reducer: CoreReducer = self._of()
        module = reducer.module
        # Recomputing a forward pass, for activation checkpointing, is part of backward.
        recomputing = torch._C._current_graph_task_id() != -1
        # One rank alone may evaluate. But a module in training mode without gradients may be inside
        # a reentrant checkpoint, which runs its forward pass without them first.
        training = not recomputing and (torch.is_grad_enabled() or module.training)
        # Forgets an earlier forward pass that an exception has ended.
        self._before = None
        if not training:
            return
        self._forwards += 1
        all_of_it = self._forwards <= _OFTEN or self._forwards % _OFTEN == 0
        snapshot = self._snapshot
        if snapshot.looks_different(all_of_it):
            difference = snapshot.difference(module, may_freeze=reducer.keeps_layout)
            if difference is not None:
                raise RuntimeError(
                    f"{difference} on rank {reducer.rank} after the Reducer was made: {AGAIN}"
                )
            reducer.look_at_layers()
        reducer.check_complete()
        if self._watches_writes and all_of_it:
            self._before = [*map(_version, snapshot.parameters.values())]

    def on_forwarded(self, outputs: object) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        now = [*map(_version, self._snapshot.parameters.values())]
        if now == before:
            return
        names = self._snapshot.parameters
        written = [n for n, then, this in zip(names, before, now, strict=True) if then != this]
        self._written |= dict.fromkeys(written)
        # Writes before the first average make the Reducer compare ranks. Later ones would not.
        reducer: CoreReducer = self._of()
        if written and reducer.iteration and not self._compares(reducer):
            raise RuntimeError(
                f"a forward pass on rank {reducer.rank} has written "
                f"to {shortened(written)}, which other ranks may not have: write to parameters "
                f"after the step, alike on every rank; or let the Reducer compare ranks, with "
                f"check_every=N"
            )

    def _compares(self, reducer: CoreReducer) -> bool:
        return DriftCheck in map(type, reducer.extensions)

    def compare_writers(self) -> None:
        """Has ranks compared from now on if a forward pass on any of them has written."""
        reducer: CoreReducer = self._of()
        if not self._compares(reducer):
            group = reducer.process_group
            with on_gpu_of(reducer.module):
                counts = gather_integers([len(self._written)], group)
            if any(map(any, counts)):
                every = EVERY_AFTER_WRITES
                drift = DriftCheck(every, reducer.module, group, self._ignore, after_writes=True)
                reducer.add_extension(drift)  # which is called in this average, too


class _FirstAverage(Extension):
    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def on_average(self, iteration: int, takes_part: bool) -> None:
        if iteration == 1:
            self._checks.compare_writers()
        else:
            # Not in the first, which may be repeated (`abort_step`).
            self._of().remove_extension(self)


def sync_batch_norms(module: torch.nn.Module) -> list[_BatchNorm]:
    """Returns the layers in training that take their moments over several ranks."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and hasattr(layer, "process_group") and layer.training
    ]


class ModuleSnapshot:
    """The parameters of a module when the Reducer was made, but those to ignore."""

    def __init__(self, module: torch.nn.Module, ignore: Collection[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        self.parameters = self._parameters_of(module)
        everyone = self.parameters.values()
        self._traits = [*map(_requires_grad, everyone)], [*map(_dtype, everyone)]
        self._devices = [*map(_device, everyone)]
        self.look_at(module)

    def look_at(self, module: torch.nn.Module) -> None:
        """Notes which tensors and modules each submodule owns."""
        pairs = ((owner._parameters, owner._modules) for owner in module.modules())
        tables: list[Any] = [*chain.from_iterable(pairs)]
        self._full = [table.values() for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._owned = [*chain.from_iterable(self._full)]

    def looks_different(self, all_of_it: bool) -> bool:
        """True if `difference` is to look for a change; asked in every forward pass.

        With `all_of_it` dtypes and devices are compared, too.
        """
        everyone = self.parameters.values()
        if [*map(_requires_grad, everyone)] != self._traits[0]:
            return True
        # Cheaper than collecting names in every forward pass.
        if not all(map(is_, chain.from_iterable(self._full), self._owned)):
            return True
        if sum(map(len, self._full)) != len(self._owned) or any(self._empty):
            return True
        if not all_of_it:
            return False
        now = [*map(_dtype, everyone)], [*map(_device, everyone)]
        return now != (self._traits[1], self._devices)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """By name. Raises a ValueError if no parameter requires a gradient."""
        found = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if not found:
            raise ValueError("the module has no parameter that requires a gradient")
        return found

    def difference(self, module: torch.nn.Module, may_freeze: bool = False) -> str | None:
        """Returns the first change, such as "parameter fc.bias was added"; None without a change.

        With `may_freeze` a parameter that required a gradient may require none now.
        """
        now = self._parameters_of(module)
        for name in self.parameters | now:
            then, this = self.parameters.get(name), now.get(name)
            if this is None and hasattr(then, "_st_info"):
                # Inside a DTensor from the first forward on; see `torch_ddp/internals.py`.
                continue
            # A substitute is there for one call only (torch.func.functional_call).
            if then is not this and not (then is not None and _is_substitute(this)):
                verb = "removed" if this is None else "added" if then is None else "replaced"
                return f"parameter {name} was {verb}"
        # A layer was replaced and its parameters were kept: converted batch norm. Substitutes
        # are not recorded: once they are freed, Python may give their ids to other objects.
        if not any(_is_substitute(parameter) for parameter in now.values()):
            self.look_at(module)
        everyone = self.parameters.values()
        traits = [*map(_requires_grad, everyone)], [*map(_dtype, everyone)]
        devices = [*map(_device, everyone)]
        thens = zip(*self._traits, self._devices, strict=True)
        nows = zip(*traits, devices, strict=True)
        for name, before, after in zip(self.parameters, thens, nows, strict=True):
            if before != after and not (may_freeze and before == (True, *after[1:])):
                requires_grad, dtype, device = after
                return (
                    f"parameter {name} became {dtype} on {device} with "
                    f"requires_grad={requires_grad}"
                )
        return None

    def _parameters_of(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in module.named_parameters() if n not in self._ignore}


def _is_substitute(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and not isinstance(parameter, torch.nn.Parameter)


# With `max_norm` these layers rescale, in forward, the rows that this rank has looked up.
_RESCALING = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def _check_rescaling(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for layer in module.modules():
        if isinstance(layer, _RESCALING) and layer.max_norm is not None:
            name = names.get(id(layer.weight))
            if name is not None:
                raise ValueError(
                    f"parameter {name} belongs to an {type(layer).__name__} with max_norm="
                    f"{layer.max_norm:g}, which rescales in forward what its own rank looks up: "
                    f"ranks would drift apart. Make it without max_norm, and call "
                    f"weight.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g}) under "
                    f"torch.no_grad() after each step"
                )
