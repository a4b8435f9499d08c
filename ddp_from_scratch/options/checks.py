"""Raises if an average would be missing or wrong, and names the parameter and the rank."""

from collections.abc import Collection, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_from_scratch.common.errors import AGAIN, shortened
from ddp_from_scratch.common.group import on_gpu_of
from ddp_from_scratch.core.bucket import Bucket, BucketState
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.hooks import current_pass
from ddp_from_scratch.core.reducer import IDLE, CoreReducer
from ddp_from_scratch.options.launch_order import look_for_layers
from ddp_from_scratch.options.unused import will_accumulate_any
from ddp_from_scratch.sync.check_sync import (
    EVERY_AFTER_WRITES,
    NOT_SENT,
    WRITTEN,
    DriftCheck,
    gather_integers,
)

# Mapped over all parameters before every forward pass, so they must not be Python functions.
_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")
_traits = attrgetter("requires_grad", "dtype", "device")
_OFTEN = 10  # expensive checks run in each of the first 10 forward passes, then in every tenth


class Checks(Extension):
    """Detects a changed module, and forward passes that write to parameters.

    `regroups`: ranks may join or leave later, as with virtual ranks, so one rank is checked, too.
    """

    def __init__(
        self, snapshot: "ModuleSnapshot", ignore: Collection[str], regroups: bool = False
    ) -> None:
        self._snapshot = snapshot
        self.ignore = ignore
        self._watches_writes = regroups
        self.began: int = 0  # the number of averages before the first one of these ranks
        # Versions of all parameters at the start of the current forward pass in training; None
        # otherwise. torch does not count writes to `parameter.data`, so these are missed.
        self._before: list[int] | None = None
        self.has_written: bool = False  # a forward pass, to a parameter
        self._forwards = 0

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._watches_writes |= dist.get_world_size(reducer.process_group) > 1
        if self._watches_writes:
            reducer.add_extension(_FirstAverage(self))
            _check_rescaling(reducer.module, self._snapshot.parameters)

    def on_forward(self) -> None:
        reducer: CoreReducer = self._of()
        module = reducer.module
        # An exception may have ended the last forward pass before `on_forwarded`.
        self._before = None
        # Activation checkpointing recomputes forward passes inside backward.
        recomputing = current_pass() != -1
        # An evaluation under no_grad() may run on one rank alone, so it is not checked. A module in
        # training mode is: reentrant checkpoints first run their forward pass under no_grad().
        if recomputing or not (torch.is_grad_enabled() or module.training):
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
            look_for_layers(reducer)
        self.check_complete()
        if self._watches_writes and all_of_it:
            self._before = [*map(_version, snapshot.parameters.values())]

    def on_forwarded(self, outputs: object) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        names = self._snapshot.parameters
        now = [*map(_version, names.values())]
        if now == before:
            return
        self.has_written = True
        # Writes before the first average lead to a comparison (`_FirstAverage`); later ones raise.
        reducer: CoreReducer = self._of()
        if reducer.iteration > self.began and reducer.extension(DriftCheck) is None:
            written = [n for n, then, this in zip(names, before, now, strict=True) if then != this]
            raise RuntimeError(
                f"a forward pass on rank {reducer.rank} has written to {shortened(written)}, which "
                f"other ranks may not have: write to parameters after the step, equally on all "
                f"ranks; or let the Reducer compare ranks, with check_every=N"
            )

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.check_complete()

    def on_set_step(self) -> None:
        reducer: CoreReducer = self._of()
        self.began = reducer.iteration
        if not self._watches_writes:
            return
        # Ranks that join know nothing of earlier averages, so all ranks begin again.
        drift, first = reducer.extension(DriftCheck), reducer.extension(_FirstAverage)
        if drift is not None and drift.advice:
            reducer.remove_extension(drift)
        if first is None:
            reducer.add_extension(_FirstAverage(self), first=True)

    def check_complete(self) -> None:
        """Raises unless every gradient of the last backward pass has been averaged."""
        reducer: CoreReducer = self._of()
        rank, buckets = reducer.rank, reducer.all_buckets
        if current_pass() != -1 and (
            # Before this Reducer's first gradient of the pass, too.
            reducer.pass_number != IDLE or (reducer.sync and will_accumulate_any(reducer))
        ):
            raise RuntimeError(
                f"an optimizer stepped during backward on rank {rank}, on gradients that are not "
                f"averaged yet: let it step when backward() has returned"
            )
        # The last bucket is unpacked last. If it is not FILLING, an exception ended `finish` early.
        if reducer.pass_number != IDLE or buckets[-1].state is not BucketState.FILLING:
            raise RuntimeError(f"the last backward pass on rank {rank} was interrupted: {AGAIN}")
        for bucket in buckets:
            if bucket.noted:
                reducer.count_noted()
            if len(bucket.missing) < len(bucket.members):
                raise RuntimeError(
                    f"no gradient in the last backward pass on rank {rank} for: "
                    f"{shortened(reducer.missing())}. Every parameter must take part in the loss "
                    f"on every rank, unless the Reducer has find_unused_parameters=True"
                )

    def check_gradient(self, index: int, gradient: torch.Tensor | None, bucket: Bucket) -> None:
        reducer: CoreReducer = self._of()
        name, rank = reducer.names[index], reducer.rank
        if gradient is not None and gradient.is_sparse and not bucket.is_sparse:
            raise RuntimeError(
                f"the gradient of parameter {name} is sparse on rank {rank}, but its module does "
                f"not declare it: only the weights of Embedding and EmbeddingBag with "
                f"sparse=True are gathered, others lie in flat buckets"
            )
        if gradient is not None and gradient.requires_grad and bucket.keeps_no_graph:
            raise RuntimeError(
                f"backward(create_graph=True) on rank {rank}: the gradient of parameter {name} "
                f"cannot keep its graph, since it is {bucket.keeps_no_graph}"
            )


class _FirstAverage(Extension):
    """Compares the ranks' parameters in the first average; a program may not have sent them.

    Adds a `DriftCheck` if a forward pass on any rank has written to parameters before.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def on_all_launched(self) -> RuntimeError | None:
        reducer: CoreReducer = self._of()
        if reducer.iteration > self._checks.began:
            # The first average may be repeated (`abort_step`), so this stays until the second.
            reducer.remove_extension(self)
            return None
        module, group = reducer.module, reducer.process_group
        with on_gpu_of(module):
            counts = gather_integers([int(self._checks.has_written)], group)
        written = any(map(any, counts))
        advice = WRITTEN if written else NOT_SENT
        drift = DriftCheck(EVERY_AFTER_WRITES, module, group, self._checks.ignore, advice)
        if written and reducer.extension(DriftCheck) is None:
            reducer.add_extension(drift)
        else:
            drift.attach(reducer)
        return drift.on_all_launched()


def sync_batch_norms(module: torch.nn.Module) -> list[_BatchNorm]:
    """Returns the layers in training mode that compute their moments over several ranks."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and hasattr(layer, "process_group") and layer.training
    ]


class ModuleSnapshot:
    """A module's parameters when the Reducer was made, without the ignored ones."""

    def __init__(self, module: torch.nn.Module, ignore: Collection[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        self.parameters: dict[str, torch.nn.Parameter] = self._parameters_of(module)
        everyone = self.parameters.values()
        self._trains, self._traits = [*map(_requires_grad, everyone)], [*map(_traits, everyone)]
        self.look_at(module)

    def look_at(self, module: torch.nn.Module) -> None:
        """Records which parameters and modules each submodule owns."""
        pairs = ((owner._parameters, owner._modules) for owner in module.modules())
        tables: list[Any] = [*chain.from_iterable(pairs)]
        self._full = [table.values() for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._owned = [*chain.from_iterable(self._full)]

    def looks_different(self, all_of_it: bool) -> bool:
        """True if something may have changed. `all_of_it` also compares dtypes and devices."""
        everyone = self.parameters.values()
        return (
            [*map(_requires_grad, everyone)] != self._trains
            or not all(map(is_, chain.from_iterable(self._full), self._owned))
            or sum(map(len, self._full)) != len(self._owned)
            or any(self._empty)
            or (all_of_it and [*map(_traits, everyone)] != self._traits)
        )

    def difference(self, module: torch.nn.Module, may_freeze: bool = False) -> str | None:
        """Returns the first change, such as "parameter fc.bias was added", or None."""
        now = self._parameters_of(module)
        for name in self.parameters | now:
            then, this = self.parameters.get(name), now.get(name)
            if this is None and hasattr(then, "_st_info"):
                # After the first forward it is inside a DTensor (`torch_ddp/internals.py`).
                continue
            # torch.func.functional_call substitutes parameters for one call.
            if then is not this and not (then is not None and _is_substitute(this)):
                verb = "removed" if this is None else "added" if then is None else "replaced"
                return f"parameter {name} was {verb}"
        # A replaced layer may have kept its parameters (converted batch norm). Records the new
        # owners, except during a substitution, which ends with the call.
        if not any(_is_substitute(parameter) for parameter in now.values()):
            self.look_at(module)
        for (name, parameter), before in zip(self.parameters.items(), self._traits, strict=True):
            after = _traits(parameter)
            if before != after and not (may_freeze and before == (True, *after[1:])):
                trains, dtype, device = after
                return f"parameter {name} became {dtype} on {device} with requires_grad={trains}"
        return None

    def _parameters_of(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in module.named_parameters() if n not in self._ignore}


def _is_substitute(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and not isinstance(parameter, torch.nn.Parameter)


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
