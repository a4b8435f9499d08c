"""What a module's parameters were when they were laid into buckets, to notice when they change."""

import torch


class Snapshot:
    """The parameters of a module at one moment.

    Args:
        module: looked at now, and again by each `difference()`.

    Attributes:
        parameters: all of them, by name.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters = dict(module.named_parameters())
        self._traits = {name: _traits(p) for name, p in self.parameters.items()}
        # Names are not built anew in every forward pass: it is enough to compare who owns what.
        self._owners = [(owner, _owned(owner)) for owner in module.modules()]

    def difference(self, module: torch.nn.Module) -> str | None:
        """The first thing that is not as it was, such as "parameter fc.bias was added"."""
        if any(_owned(owner) != owned for owner, owned in self._owners):
            now = dict(module.named_parameters())
            for name in self.parameters | now:
                before, after = self.parameters.get(name), now.get(name)
                if before is not after:
                    verb = "removed" if after is None else "added" if before is None else "replaced"
                    return f"parameter {name} was {verb}"
        for name, parameter in self.parameters.items():
            if self._traits[name] != _traits(parameter):
                return f"parameter {name} became {_describe(parameter)}"
        return None


def _owned(module: torch.nn.Module) -> list[int]:
    return [id(o) for o in (*module._parameters.values(), *module._modules.values())]


def _traits(parameter: torch.Tensor) -> tuple[bool, torch.dtype, torch.device]:
    return parameter.requires_grad, parameter.dtype, parameter.device


def _describe(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} on {parameter.device} with requires_grad={parameter.requires_grad}"
