"""A module's parameters when they were laid into buckets, to notice when they change."""

from collections.abc import Collection

import torch

AGAIN = "call remove() on the Reducer and make a new one, on every rank"


class ModuleSnapshot:
    """The parameters of a module at one moment.

    Args:
        module: looked at now, and again by each `difference()`.
        ignore: names of parameters that are left out.

    Attributes:
        parameters: all others, by name.
        communicating: layers that have collectives of their own, such as synchronised batch norm.
    """

    def __init__(self, module: torch.nn.Module, ignore: Collection[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        self.parameters = self._parameters_of(module)
        self._traits = {name: _traits(p) for name, p in self.parameters.items()}
        self._look_at(module)

    def _look_at(self, module: torch.nn.Module) -> None:
        # Comparing owners is enough, and cheaper than collecting names in every forward pass.
        self._owners = [(owner, _owned(owner)) for owner in module.modules()]
        self.communicating = [m for m in module.modules() if hasattr(m, "process_group")]

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Those that require a gradient, by name.

        Raises:
            ValueError: none does.
        """
        found = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if not found:
            raise ValueError("the module has no parameter that requires a gradient")
        return found

    def check(self, module: torch.nn.Module, may_freeze: bool, rank: int) -> None:
        """Raises if there is a difference; arguments as of `difference`."""
        difference = self.difference(module, may_freeze)
        if difference is not None:
            raise RuntimeError(f"{difference} on rank {rank} after the Reducer was made: {AGAIN}")

    def difference(self, module: torch.nn.Module, may_freeze: bool = False) -> str | None:
        """The first change, such as "parameter fc.bias was added"; None if there is none.

        Args:
            module: the one that the snapshot was made of.
            may_freeze: a parameter that required a gradient then may require none now.
        """
        if any(_owned(owner) != owned for owner, owned in self._owners):
            now = self._parameters_of(module)
            for name in self.parameters | now:
                then, this = self.parameters.get(name), now.get(name)
                if this is None and hasattr(then, "_st_info"):
                    continue  # inside a DTensor from the first forward on: `arguments.take_local`
                # What is no Parameter is there for one call only (torch.func.functional_call).
                if then is not this and not (then is not None and _is_substitute(this)):
                    verb = "removed" if this is None else "added" if then is None else "replaced"
                    return f"parameter {name} was {verb}"
            # A layer was replaced, with its parameters kept: converted batch norm. Not for what is
            # there for one call only: what comes later may have the number of what has gone.
            if not any(_is_substitute(parameter) for parameter in now.values()):
                self._look_at(module)
        for name, parameter in self.parameters.items():
            before, after = self._traits[name], _traits(parameter)
            if before != after and not (may_freeze and before == (True, *after[1:])):
                return f"parameter {name} became {_describe(parameter)}"
        return None

    def _parameters_of(self, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in module.named_parameters() if n not in self._ignore}


def _is_substitute(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and not isinstance(parameter, torch.nn.Parameter)


def _owned(module: torch.nn.Module) -> list[int]:
    return [id(o) for o in (*module._parameters.values(), *module._modules.values())]


def _traits(parameter: torch.Tensor) -> tuple[bool, torch.dtype, torch.device]:
    return parameter.requires_grad, parameter.dtype, parameter.device


def _describe(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} on {parameter.device} with requires_grad={parameter.requires_grad}"
