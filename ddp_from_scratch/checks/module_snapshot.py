"""Records a module's parameters when they are laid out in buckets, to detect later changes."""

from collections.abc import Collection

import torch

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
        # Comparing the ids that each submodule owns is enough, and cheaper than collecting names in
        # every forward pass.
        self._owners = [(owner, _owned(owner)) for owner in module.modules()]
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
        if any(_owned(owner) != owned for owner, owned in self._owners):
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


def _owned(module: torch.nn.Module) -> list[int]:
    return [*map(id, module._parameters.values()), *map(id, module._modules.values())]


def _traits(
    parameters: Collection[torch.Tensor],
) -> tuple[list[bool], list[torch.dtype], list[torch.device]]:
    # Three lists rather than a tuple for each parameter: this runs before every forward pass.
    return (
        [parameter.requires_grad for parameter in parameters],
        [parameter.dtype for parameter in parameters],
        [parameter.device for parameter in parameters],
    )


def _describe(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} on {parameter.device} with requires_grad={parameter.requires_grad}"
