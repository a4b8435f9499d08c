"""Waits in forward: each module waits for the parameters that it reads (`overlap_forward`)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


class ForwardWaits:
    """Calls `wait` with the parameters that a module reads, before its forward pass.

    A module reads its own parameters, and those of children that were never called: for example
    `torch.nn.MultiheadAttention` reads the weight of its `out_proj` itself. `wait(None)` waits for
    all parameters, before the first call of each module and before `state_dict()`.
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
            part.register_forward_pre_hook(partial(self._before, name))
            part.register_state_dict_pre_hook(lambda *_: wait(None))

    def _before(self, name: str, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("overlap_forward=True cannot be compiled: leave it out")
        if name not in self._called:
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
