"""Waits for parameters that are on their way when something reads them (`overlap_forward`)."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.core.hooks import nothing

Wait = Callable[[Iterable[torch.Tensor] | None], None]

# Tables of every module, which hold no reference of its own to a parameter.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
# Values that hold no parameter, and modules, whose own tables wait.
_WITHOUT_TENSORS = (
    *(int, float, complex, str, bytes, NoneType, type, ModuleType, torch.nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    dist.ProcessGroup,
)


class ForwardWaits:
    """Calls `wait` with parameters before a program reads them through the module.

    Any module, or code outside of them, may read any parameter: a parent reads its children's
    weights, or only does so in evaluation. So it is the read that waits, whoever reads:

    - an attribute (`layer.weight`), `parameters()` and the like, in each module's table of
      parameters (`_Table`);
    - tensors that a module keeps elsewhere in its attributes, also in lists, dicts, functions and
      the like, as `nn.LSTM` does: before its forward pass;
    - what cannot be seen: all parameters, before forward passes that are compiled or scripted or of
      modules with attributes of other kinds, such as a dataclass, and before `state_dict()` and
      `load_state_dict()`.

    `arriving` is empty while nothing is on its way. `wait(None)` waits for all parameters.
    """

    def __init__(self, module: torch.nn.Module, wait: Wait, arriving: Mapping[Any, Any]) -> None:
        self._wait, self.arriving = wait, arriving
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
        if self.arriving:
            self._wait([parameter for parameter in parameters if parameter is not None])

    def before_forward(self, module: torch.nn.Module) -> None:
        if not self.arriving:
            return
        if isinstance(module, torch.jit.ScriptModule):  # runs without Python
            self._wait(None)
        elif kept := [*_tensors(_own_attributes(module))]:
            seen = [tensor for tensor in kept if tensor is not None]
            self._wait(seen if len(seen) == len(kept) else None)

    def before_state(self, module: torch.nn.Module) -> None:
        self._wait(None)


def _own_attributes(module: torch.nn.Module) -> Iterator[Any]:
    return (value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)


def _tensors(values: Iterable[Any], depth: int = 4) -> Iterator[torch.Tensor | None]:
    """Returns the tensors in these values; None for a value that may hold others."""
    for value in values:
        if isinstance(value, weakref.ref):
            value = value()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, _WITHOUT_TENSORS):
            continue
        elif depth and (inner := _inside(value)) is not None:
            yield from _tensors(inner, depth - 1)
        else:
            yield None


def _inside(value: Any) -> Iterable[Any] | None:
    """Returns the values that one holds; None if that is unknown."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return value.__self__, getattr(value, "__func__", None)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        named = value.__kwdefaults__ or {}
        return [*cells, *(value.__defaults__ or ()), *named.values()]
    return None


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable without a value
        return False


class _Table(dict[str, torch.nn.Parameter | None]):
    """A module's table of parameters, whose reads wait. A copy is an ordinary dict."""

    def __init__(self, table: Mapping[str, torch.nn.Parameter | None]) -> None:
        super().__init__(table)
        self.waits: list[weakref.ref[ForwardWaits]] = []

    def __iter__(self) -> Iterator[str]:
        # Without this method, dict(table) and {**table} would read without calling any method.
        return super().__iter__()

    def _before_read(self, parameters: Iterable[torch.Tensor | None]) -> None:
        for found in self.waits:
            if (waits := found()) is not None and waits.arriving:
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

    def copy(self) -> dict[str, torch.nn.Parameter | None]:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else super().setdefault(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.get(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, torch.nn.Parameter | None]:
        name = next(reversed(self), None)
        return super().popitem() if name is None else (name, self.pop(name))

    def __repr__(self) -> str:
        return repr(dict(self))

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
