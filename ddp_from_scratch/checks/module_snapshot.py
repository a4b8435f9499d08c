"""Detects that parameters have changed: since the Reducer was made, or in a forward pass."""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from operator import attrgetter

import torch
import torch.distributed as dist

from ddp_from_scratch.sync.check_sync import gather_integers

AGAIN = "call remove() on the Reducer and make a new one, on every rank"


class ModuleSnapshot:
    """The parameters of a module when the Reducer was made.

    Attributes:
        parameters: all but those to ignore, by name.
        communicating: layers that have collectives of their own, such as synchronised batch norm.
    """

    def __init__(self, module: torch.nn.Module, ignore: Collection[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        self.parameters = self._parameters_of(module)
        self._traits = _traits(self.parameters.values())
        self._look_at(module)

    def _look_at(self, module: torch.nn.Module) -> None:
        # Comparing the ids of what submodules own is enough, and cheaper than collecting names in
        # every forward pass.
        self._owners = [*module.modules()]
        self._owned = _owned(self._owners)
        self.communicating = [m for m in module.modules() if hasattr(m, "process_group")]

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters that require a gradient, by name.

        Raises:
            ValueError: no parameter requires a gradient.
        """
        found = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if not found:
            raise ValueError("the module has no parameter that requires a gradient")
        return found

    def difference(self, module: torch.nn.Module, may_freeze: bool = False) -> str | None:
        """Returns the first change, such as "parameter fc.bias was added"; None without a change.

        With `may_freeze` a parameter that required a gradient may require none now.
        """
        if _owned(self._owners) != self._owned:
            now = self._parameters_of(module)
            for name in self.parameters | now:
                then, this = self.parameters.get(name), now.get(name)
                if this is None and hasattr(then, "_st_info"):
                    # Inside a DTensor from the first forward on; see `torch_ddp/arguments.py`.
                    continue
                # A substitute is there for one call only (torch.func.functional_call).
                if then is not this and not (then is not None and _is_substitute(this)):
                    verb = "removed" if this is None else "added" if then is None else "replaced"
                    return f"parameter {name} was {verb}"
            # A layer was replaced and its parameters were kept: converted batch norm. Substitutes
            # are not recorded: once they are freed, Python may give their ids to other objects.
            if not any(_is_substitute(parameter) for parameter in now.values()):
                self._look_at(module)
        traits = _traits(self.parameters.values())
        if traits == self._traits:
            return None
        thens, nows = zip(*self._traits, strict=True), zip(*traits, strict=True)
        for name, before, after in zip(self.parameters, thens, nows, strict=True):
            if before != after and not (may_freeze and before == (True, *after[1:])):
                return f"parameter {name} became {_describe(self.parameters[name])}"
        return None

    def _parameters_of(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in module.named_parameters() if n not in self._ignore}


def _is_substitute(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and not isinstance(parameter, torch.nn.Parameter)


# These run before every forward pass, for all parameters: without a Python call for each.


def _owned(modules: Iterable[torch.nn.Module]) -> list[int]:
    tables = chain.from_iterable(map(attrgetter("_parameters", "_modules"), modules))
    return [*map(id, chain.from_iterable(map(dict.values, tables)))]


def _traits(
    parameters: Collection[torch.Tensor],
) -> tuple[list[bool], list[torch.dtype], list[torch.device]]:
    names = "requires_grad", "dtype", "device"
    requires_grad, dtype, device = ([*map(attrgetter(name), parameters)] for name in names)
    return requires_grad, dtype, device


def _describe(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} on {parameter.device} with requires_grad={parameter.requires_grad}"


# With `max_norm` these layers rescale, in forward, the rows that this rank has looked up.
_RESCALING = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class ForwardWrites:
    """Compares parameters' version counters before and after a forward pass in training.

    Writes to `parameter.data` are missed: torch does not count them.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters  # also frozen ones
        # Versions at the beginning of the forward pass under way; None outside of one in training.
        self._before: list[int] | None = None
        self.names: list[str] = []  # what forward passes have written to so far

    def on_enter(self, trains: bool) -> None:
        """Begins a forward pass; watches it only if it trains.

        Forgets an earlier forward pass that an exception has ended.
        """
        self._before = self._versions() if trains else None

    def _versions(self) -> list[int]:
        return [*map(attrgetter("_version"), self._parameters.values())]

    def on_exit(self) -> list[str]:
        """Ends the forward pass; returns the names of parameters it has written to. Idempotent."""
        before, self._before = self._before, None
        if before is None:
            return []
        now = self._versions()
        if now == before:
            return []
        written = [n for n, a, b in zip(self._parameters, before, now, strict=True) if a != b]
        self.names += [name for name in written if name not in self.names]
        return written

    def on_any_rank(self, process_group: dist.ProcessGroup | None) -> bool:
        """True if a forward pass has written to parameters on some rank. Collective."""
        return any(count for (count,) in gather_integers([len(self.names)], process_group))


def check_rescaling(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises if a layer is known to rescale one of these parameters in forward.

    Raises:
        ValueError: the layer is an embedding with `max_norm`.
    """
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
