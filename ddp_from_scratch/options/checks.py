"""Raises if an average would be missing or wrong, and names the parameter and the rank."""

import inspect
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.autograd
from torch.distributed import rpc
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import stateless

from ddp_from_scratch.common.errors import AGAIN, shortened
from ddp_from_scratch.common.group import on_gpu_of
from ddp_from_scratch.common.memory import OVERLAPS, overlaps, unsupported
from ddp_from_scratch.core.bucket import BucketState
from ddp_from_scratch.core.hooks import current_pass
from ddp_from_scratch.core.observer import Check, Observer
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.options.comm_hooks import allreduce_hook
from ddp_from_scratch.options.launch_order import look_for_layers
from ddp_from_scratch.options.unused import Unused, will_accumulate_any
from ddp_from_scratch.sync.broadcast import first_difference
from ddp_from_scratch.sync.check_sync import (
    EVERY_AFTER_WRITES,
    NOT_SENT,
    WRITTEN,
    DriftCheck,
    gather_integers,
)

# Mapped over all parameters before every forward pass, so they must not be Python functions.
_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")
_traits = attrgetter("dtype", "device", "grad_dtype")
# Expensive checks run in each of the first 10 forward passes, then in every tenth.
_FULL_CHECK_EVERY = 10
# Both put other tensors in the place of a module's parameters, until the call returns.
_SUBSTITUTES = {
    inspect.unwrap(function).__code__
    for function in (torch.func.functional_call, stateless.functional_call)
}
_ON_PURPOSE = (
    "; or, if ranks differ on purpose during backward, make the Reducer with "
    "check_first_average=False"
)


class Checks(Observer):
    """Detects a changed module, and forward passes that write to parameters.

    `options`: lines of text that must be the same on all ranks. `check_first_average`: compare
    them, the comm hooks and the ranks' parameters in the first average. `regroups`: ranks may join
    or leave later, as with virtual ranks, so one rank is checked, too.
    """

    def __init__(
        self,
        snapshot: "ModuleSnapshot",
        ignore: Collection[str],
        options: Sequence[str] = (),
        check_first_average: bool = True,
        regroups: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self.ignore = ignore
        self.options = options
        self.check_first_average = check_first_average
        # torch does not count the writes to a tensor that was made in inference mode.
        self._versioned = {n: p for n, p in snapshot.parameters.items() if not p.is_inference()}
        self._watches_writes = regroups
        self.began: int = 0  # the number of averages before the first one of these ranks
        # Versions of all parameters at the start of the current forward pass in training; None
        # otherwise. torch does not count writes to `parameter.data`, so these are missed.
        self._before: list[int] | None = None
        self.has_written: bool = False  # a forward pass, to a parameter
        self._looks = 0  # at the module, before forward passes and steps
        # The average for which a forward pass, or else a step, has looked last. A program may call
        # methods of the module instead of the module, and a ModuleList has no forward pass.
        self._looked_for = -1

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._watches_writes |= dist.get_world_size(reducer.process_group) > 1
        if self._watches_writes:
            reducer.add_observer(_FirstAverage(self))
            _check_rescaling(reducer.module, self.snapshot.parameters)

    def on_forward(self) -> None:
        reducer: CoreReducer = self._reducer()
        module = reducer.module
        # An exception may have ended the last forward pass before `on_forwarded`.
        self._before = None
        # Activation checkpointing recomputes forward passes inside backward.
        recomputing = current_pass() != -1
        # An evaluation under no_grad() may run on one rank alone, so it is not checked. A module in
        # training mode is: reentrant checkpoints first run their forward pass under no_grad().
        if recomputing or not (torch.is_grad_enabled() or module.training):
            return
        self._looks, self._looked_for = self._looks + 1, reducer.iteration
        all_of_it = self._looks <= _FULL_CHECK_EVERY or self._looks % _FULL_CHECK_EVERY == 0
        if self.snapshot.looks_different(all_of_it):
            self._check_same_module()
        self.check_complete()
        if self._looks % _FULL_CHECK_EVERY == 1 and _in_distributed_autograd():
            raise RuntimeError(
                f"a forward pass on rank {reducer.rank} runs inside "
                f"torch.distributed.autograd.context(), whose backward() leaves .grad alone, so "
                f"nothing would be averaged: call loss.backward() outside of it"
            )
        if self._watches_writes and all_of_it:
            self._before = [*map(_version, self._versioned.values())]

    def _check_same_module(self) -> None:
        """Raises if the module has changed in a way that the Reducer cannot follow."""
        reducer: CoreReducer = self._reducer()
        may_freeze = reducer.usage is not None and reducer.usage.fixed_layout
        difference = self.snapshot.difference(reducer.module, may_freeze=may_freeze)
        if difference is not None:
            raise RuntimeError(
                f"{difference.what} on rank {reducer.rank} after the Reducer was made: "
                f"{difference.remedy}"
            )
        look_for_layers(reducer)

    def on_forwarded(self, outputs: object) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        names = self._versioned
        now = [*map(_version, names.values())]
        if now == before:
            return
        self.has_written = True
        # Writes before the first average lead to a comparison (`_FirstAverage`); later ones raise.
        reducer: CoreReducer = self._reducer()
        if reducer.iteration > self.began and reducer.observer(DriftCheck) is None:
            written = [n for n, then, this in zip(names, before, now, strict=True) if then != this]
            raise RuntimeError(
                f"a forward pass on rank {reducer.rank} has written to {shortened(written)}, which "
                f"other ranks may not have: write to parameters after the step, equally on all "
                f"ranks; or let the Reducer compare ranks, with check_every=N"
            )

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.check_complete()
        last: int = self._reducer().iteration - 1
        if self._looked_for < last:
            self._looks, self._looked_for = self._looks + 1, last
            if self.snapshot.looks_different(self._looks % _FULL_CHECK_EVERY == 0):
                with torch.enable_grad():  # without it, parameters may be lent for one call
                    self._check_same_module()

    def on_set_step(self) -> None:
        reducer: CoreReducer = self._reducer()
        self.began = reducer.iteration
        self._looked_for = self.began - 1
        if not self._watches_writes:
            return
        # Ranks that join know nothing of earlier averages, so all ranks begin again.
        drift, first = reducer.observer(DriftCheck), reducer.observer(_FirstAverage)
        if drift is not None and drift.advice:
            reducer.remove_observer(drift)
        if first is None:
            reducer.add_observer(_FirstAverage(self), first=True)

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        reducer: CoreReducer = self._reducer()
        rank, buckets = reducer.rank, reducer.all_buckets
        if current_pass() != -1 and (
            # Before this Reducer's first gradient of the pass, too.
            reducer.backward is not None or (reducer.sync and will_accumulate_any(reducer))
        ):
            raise RuntimeError(
                f"an optimizer stepped during backward on rank {rank}, on gradients that are not "
                f"averaged yet: let it step when backward() has returned"
            )
        # The last bucket is unpacked last. If it is not FILLING, an exception ended `finish` early.
        if reducer.backward is not None or buckets[-1].state is not BucketState.FILLING:
            raise RuntimeError(f"the last backward pass on rank {rank} was interrupted: {AGAIN}")
        for bucket in buckets:
            if bucket.deferred:
                reducer.flush_deferred()
            if len(bucket.missing) < len(bucket.members):
                raise RuntimeError(
                    f"no gradient in the last backward pass on rank {rank} for: "
                    f"{shortened(reducer.missing())}. Every parameter must take part in the loss "
                    f"on every rank, unless the Reducer has find_unused_parameters=True"
                )


class _FirstAverage(Check):
    """Compares the ranks' options, comm hooks and parameters in the first average.

    A program may not have sent the parameters. Only here are the options of Reducers with virtual
    ranks compared, whose ranks may meet later.

    Adds a `DriftCheck` if a forward pass on any rank has written to parameters before. Does nothing
    if a rank's Reducer has `check_first_average=False`: a later write in forward then raises.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def verdict(self) -> RuntimeError | None:
        reducer: CoreReducer = self._reducer()
        if reducer.iteration > self._checks.began:
            # The first average may be repeated (`abort_step`), so this stays until the second.
            reducer.remove_observer(self)
            return None
        module, group = reducer.module, reducer.process_group
        with on_gpu_of(module):
            mine = [self._checks.has_written, self._checks.check_first_average]
            # What a program may set after it has made the Reducer is compared, too.
            hook, usage = reducer.comm.hook, reducer.usage
            # A hook of the program's may do the same as none, and for instance log on one rank.
            ours = hook.__module__.startswith(__package__) and hook is not allreduce_hook
            options = [
                *self._checks.options,
                f"the comm hook {hook.__qualname__}" if ours else "no comm hook of this package",
                f"static_graph={isinstance(usage, Unused) and usage.is_static}",
            ]
            everyone = gather_integers([*map(int, mine), zlib.crc32(repr(options).encode())], group)
            writes, compares, checksums = zip(*everyone, strict=True)
            if not all(compares):
                return None
            if len({*checksums}) > 1:
                difference = first_difference({"options": options}, group)
                assert difference is not None, "their checksums differ"
                # At once: what follows may be another collective on each rank.
                raise RuntimeError(f"the Reducers' options differ: {difference[1]}{_ON_PURPOSE}")
        written, advice = any(writes), WRITTEN if any(writes) else NOT_SENT + _ON_PURPOSE
        drift = DriftCheck(EVERY_AFTER_WRITES, module, group, self._checks.ignore, advice)
        if written and reducer.observer(DriftCheck) is None:
            reducer.add_observer(drift)
        else:
            drift.attach(reducer)
        return drift.verdict()


def _in_distributed_autograd() -> bool:
    if not (rpc.is_available() and rpc.api._is_current_rpc_agent_set()):
        return False
    try:
        torch.distributed.autograd._current_context()
    except RuntimeError:
        return False
    return True


def sync_batch_norms(module: torch.nn.Module) -> list[_BatchNorm]:
    """Returns the layers in training mode that compute their moments over several ranks."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and hasattr(layer, "process_group") and layer.training
    ]


def check_supported(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises a ValueError for a parameter that cannot be averaged or compared."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a Reducer cannot be made under torch.inference_mode(): leave it first")
    for name, parameter in parameters.items():
        reason = unsupported(parameter)
        if not reason and parameter.requires_grad:
            reason = _untrainable(parameter)
        if reason:
            raise ValueError(f"parameter {name} {reason}")


def _untrainable(parameter: torch.Tensor) -> str:
    """Returns why a parameter gets no gradient of its own, and what to do; empty if it does."""
    if parameter.is_inference():
        return (
            "was made under torch.inference_mode(), where autograd records nothing: make the "
            "module outside of it"
        )
    if not parameter.is_leaf:
        return (
            "is not a leaf: it is computed from other tensors, to which its gradient goes: make it "
            "a parameter with torch.nn.Parameter(tensor.detach().clone())"
        )
    return OVERLAPS if overlaps(parameter) else ""


class Difference(NamedTuple):
    """What has changed in a module, such as "parameter fc.bias was added", and what to do."""

    what: str
    remedy: str


_FREEZE = (
    "freeze all parameters of the Reducer together, or make it with find_unused_parameters=True "
    "and without static_graph"
)


class ModuleSnapshot:
    """A module's parameters when the Reducer was made, without the ignored ones.

    `parameters` has the names of that time. A parameter may get another name later: pruning and
    parametrizations rename it, and it remains the same object.
    """

    def __init__(self, module: torch.nn.Module, ignore: Collection[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        named = [*module.named_parameters()]
        self._ignored = {id(p): p for name, p in named if name in self._ignore}
        self.parameters: dict[str, torch.nn.Parameter] = self._parameters_of(module)
        everyone = self.parameters.values()
        self._first_names = {id(p): name for name, p in self.parameters.items()}
        self._trained = [*map(_requires_grad, everyone)]
        self._trains = self._trained  # as of the last comparison
        self.look_at(module)

    def check_supported(self) -> None:
        """Raises as the function `check_supported`; else records dtypes and devices."""
        check_supported(self.parameters)
        # Only now: up to torch 2.11 a tensor that is not a leaf has no `grad_dtype`.
        self._traits = [*map(_traits, self.parameters.values())]

    def look_at(self, module: torch.nn.Module) -> None:
        """Records which parameters and modules each submodule owns."""
        pairs = ((owner._parameters, owner._modules) for owner in module.modules())
        tables: list[Any] = [*chain.from_iterable(pairs)]
        self._full = [table.values() for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._owned = [*chain.from_iterable(self._full)]
        self._present = self._parameters_of(module)

    def looks_different(self, all_of_it: bool) -> bool:
        """True if something may have changed. `all_of_it` also compares dtypes and devices."""
        everyone = self.parameters.values()
        trains = [*map(_requires_grad, everyone)]
        return (
            # While all are frozen, nothing is averaged, so there is nothing to check.
            (trains != self._trains and any(trains))
            or not all(map(is_, chain.from_iterable(self._full), self._owned))
            or sum(map(len, self._full)) != len(self._owned)
            or any(self._empty)
            or (all_of_it and [*map(_traits, everyone)] != self._traits)
        )

    def difference(self, module: torch.nn.Module, may_freeze: bool = False) -> Difference | None:
        """Returns the first change that the Reducer cannot follow, or None."""
        return (
            self._other_parameters(module)
            or self._other_traits()
            or self._other_requires_grad(may_freeze)
        )

    def _other_parameters(self, module: torch.nn.Module) -> Difference | None:
        before, now = self._present, self._parameters_of(module)
        if any(this is not before.get(name) for name, this in now.items()) and _is_substituting():
            return None  # looked at again when the call has returned
        gone = {name: p for name, p in before.items() if p is not now.get(name)}
        new = {name: p for name, p in now.items() if p is not before.get(name)}
        # Plain tensors also take parameters' places only for one call (mixed precision).
        lent = {name for name in gone.keys() & new if not isinstance(new[name], torch.nn.Parameter)}
        here, known = set(map(id, new.values())), set(map(id, gone.values()))
        for name, parameter in gone.items():
            # After the first forward `_st_info` is inside a DTensor (`torch_ddp/internals.py`).
            if id(parameter) in here or name in lent or hasattr(parameter, "_st_info"):
                continue
            verb = "replaced" if name in new else "removed"
            return Difference(f"parameter {self._first_names[id(parameter)]} was {verb}", AGAIN)
        for name, parameter in new.items():
            if id(parameter) not in known and name not in lent:
                return Difference(f"parameter {name} was added", AGAIN)
        if not lent:
            self.look_at(module)
        return None

    def _other_traits(self) -> Difference | None:
        for (name, parameter), before in zip(self.parameters.items(), self._traits, strict=True):
            if (after := _traits(parameter)) != before:
                dtype, device, of_gradient = after
                end = "" if of_gradient == dtype else f" with gradients of {of_gradient}"
                return Difference(f"parameter {name} became {dtype} on {device}{end}", AGAIN)
        return None

    def _other_requires_grad(self, may_freeze: bool) -> Difference | None:
        trains = [*map(_requires_grad, self.parameters.values())]
        for name, then, now in zip(self.parameters, self._trained, trains, strict=True):
            if now and not then:
                return Difference(f"parameter {name} became requires_grad=True", AGAIN)
            if then and not now and not may_freeze and any(trains):
                return Difference(f"parameter {name} became requires_grad=False", _FREEZE)
        self._trains = trains
        return None

    def _parameters_of(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {
            name: p
            for name, p in module.named_parameters()
            if name not in self._ignore and id(p) not in self._ignored
        }


def _is_substituting() -> bool:
    """True if other parameters are in place only for the present call, or get no gradient."""
    if not torch.is_grad_enabled():
        return True
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _SUBSTITUTES:
            return True
        frame = frame.f_back
    return False


def _check_rescaling(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for layer in module.modules():
        if (
            isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag)
            and layer.max_norm is not None
            and id(layer.weight) in names
        ):
            raise ValueError(
                f"parameter {names[id(layer.weight)]} belongs to an {type(layer).__name__} with "
                f"max_norm={layer.max_norm:g}, which rescales the rows that its own rank looks up "
                f"in forward: ranks would drift apart. Make it without max_norm, and call "
                f"weight.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g}) under "
                f"torch.no_grad() after each step"
            )
