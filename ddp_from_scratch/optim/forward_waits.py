"""Waits in forward: each module waits for the parameters that it reads (`overlap_forward`)."""

import sys
import weakref
from collections.abc import Callable, Iterable
from types import NoneType

import torch


class ForwardWaits:
    """Calls `wait` with the parameters that a module reads, before its forward pass.

    A module reads its own parameters, and those of children that were never called: for example
    `torch.nn.MultiheadAttention` reads the weight of its `out_proj` itself. `wait(None)` waits for
    all parameters, before the first call of each module, `state_dict()` and `load_state_dict()`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        wait: Callable[[Iterable[torch.Tensor] | None], None],
    ) -> None:
        self._module, self._wait = module, wait
        self._called = set[str]()
        self._reads: dict[str, list[torch.Tensor]] = {}  # empty: to be found again
        for name, part in module.named_modules():
            part.register_forward_pre_hook(_Hook(self, name))
            part.register_state_dict_pre_hook(_Hook(self, None))
            part.register_load_state_dict_pre_hook(_Hook(self, None))

    def before(self, name: str | None) -> None:
        """Called before the forward pass of this module; None: before its state."""
        if name is None:
            self._wait(None)
        elif name not in self._called:
            self._called.add(name)
            self._reads.clear()
            self._wait(None)
        else:
            self._wait((self._reads or self._find_reads()).get(name, ()))

    def _find_reads(self) -> dict[str, list[torch.Tensor]]:
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            while owner and owner not in self._called:
                owner = owner.rpartition(".")[0]
            # Only parts of the module are called: the first of them may read anything.
            readers = [owner] if owner in self._called else self._called
            for reader in readers:
                self._reads.setdefault(reader, []).append(parameter)
        return self._reads


class _Hook:
    """A module's hook, which keeps no optimizer alive. In a copy of the module it does nothing."""

    def __init__(self, waits: ForwardWaits | None = None, name: str | None = None) -> None:
        self._waits: Callable[[], ForwardWaits | None]
        self._waits = NoneType if waits is None else weakref.ref(waits)
        self._name = name

    def __call__(self, *_: object) -> None:
        if (waits := self._waits()) is not None:
            # torch.compile must not trace a wait. Importing it for nothing would take a second.
            imported = "torch._dynamo" in sys.modules
            before = torch.compiler.disable(waits.before) if imported else waits.before
            before(self._name)

    def __reduce__(self) -> "tuple[type[_Hook], tuple[()]]":
        return _Hook, ()
