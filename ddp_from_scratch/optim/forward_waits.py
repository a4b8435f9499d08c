"""Waits for parameters that are on their way when something reads them (`overlap_forward`)."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ddp_from_scratch.core.hooks import nothing

Wait = Callable[[Iterable[torch.Tensor] | None], None]

# Tables of every module, which hold no reference of its own to a parameter.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class ForwardWaits:
    """Calls `wait` with parameters before a program reads them through the module.

    Any module, or code outside of them, may read any parameter: a parent reads its children's
    weights, or only does so in evaluation. So it is the read that waits, whoever reads:

    - an attribute (`layer.weight`), `parameters()` and the like, in each module's table of
      parameters (`_Table`);
    - tensors that a module keeps elsewhere in its attributes, also in lists, tuples and dicts, as
      `nn.LSTM` does: before its forward pass;
    - what cannot be seen: all parameters, before forward passes that are compiled or scripted, and
      before `state_dict()` and `load_state_dict()`.

    `arriving` is empty while nothing is on its way. `wait(None)` waits for all parameters.
    """

    def __init__(self, module: torch.nn.Module, wait: Wait, arriving: Mapping[Any, Any]) -> None:
        self._wait, self._arriving = wait, arriving
        for part in module.modules():
            table = vars(part).get("_parameters")
            if type(table) is dict:
                table = vars(part)["_parameters"] = _Table(table)
            if isinstance(table, _Table):
                table.waits.append(weakref.ref(self))
            part.register_forward_pre_hook(_Hook(self, "before_forward"))
            part.register_state_dict_pre_hook(_Hook(self, "before_state"))
            part.register_load_state_dict_pre_hook(_Hook(self, "before_state"))

    def before_read(self, parameters: Iterable[torch.Tensor | None]) -> None:
        if self._arriving:
            self._wait([parameter for parameter in parameters if parameter is not None])

    def before_forward(self, module: torch.nn.Module) -> None:
        if not self._arriving:
            return
        if isinstance(module, torch.jit.ScriptModule):  # runs without Python
            self._wait(None)
        elif kept := [*_tensors(_own_attributes(module))]:
            self._wait(kept)

    def before_state(self, module: torch.nn.Module) -> None:
        self._wait(None)


def _own_attributes(module: torch.nn.Module) -> Iterator[Any]:
    return (value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)


def _tensors(values: Iterable[Any], depth: int = 3) -> Iterator[torch.Tensor]:
    """Returns the tensors among these values, and in lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, (list, tuple, dict)):
            inner = value.values() if isinstance(value, dict) else value
            yield from _tensors(inner, depth - 1)


class _Table(dict[str, torch.nn.Parameter | None]):
    """A module's table of parameters, whose reads wait. A copy is an ordinary dict."""

    def __init__(self, table: Mapping[str, torch.nn.Parameter | None]) -> None:
        super().__init__(table)
        self.waits: list[weakref.ref[ForwardWaits]] = []

    def _before_read(self, parameters: Iterable[torch.Tensor | None]) -> None:
        for found in self.waits:
            if (waits := found()) is not None and waits._arriving:
                _untraced(ForwardWaits.before_read)(waits, parameters)

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._before_read((parameter,))
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # which would call this

    def items(self) -> Any:
        self._before_read([*super().values()])
        return super().items()

    def values(self) -> Any:
        values = super().values()
        self._before_read([*values])
        return values

    def __reduce__(self) -> Any:
        self._before_read([*super().values()])  # a copy reads them
        return dict, (), None, None, iter([*super().items()])


class _Hook:
    """A module's hook, which keeps no optimizer alive. In a copy of the module it does nothing."""

    def __init__(self, waits: ForwardWaits, method: str) -> None:
        self._waits = weakref.ref(waits)
        self._method = method

    def __call__(self, module: torch.nn.Module, *_: object) -> None:
        if (waits := self._waits()) is not None:
            # Compiled code reads parameters without their tables.
            method = "before_state" if torch.compiler.is_compiling() else self._method
            _untraced(getattr(ForwardWaits, method))(waits, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing()


def _untraced(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that torch.compile does not trace."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
