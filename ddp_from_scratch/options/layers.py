"""Layers that communicate in backward, such as synchronised batch norm.

All ranks must issue all collectives in one order, those of layers and those of buckets. So every
rank must launch its buckets at the same points of backward, or all of them at its end.
"""

import torch
import torch.distributed as dist

from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.reducer import CoreReducer


class CommunicatingLayers(Extension):
    """Holds full buckets back if layers communicate and the points of launch may differ."""

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._layers = layers_with_groups(reducer.module)

    def may_launch(self) -> bool:
        return has_fixed_order(self._of()) or not self.communicate()

    def communicate(self) -> bool:
        """True if layers communicate in the Reducer's own group."""
        ours = self._of().process_group or dist.group.WORLD
        return any((layer.process_group or dist.group.WORLD) is ours for layer in self._layers)


def has_fixed_order(reducer: CoreReducer) -> bool:
    """True if every rank launches its buckets at the same points of backward."""
    # They differ if the comm hook starts several collectives, or if a bucket is full earlier on a
    # rank with unused parameters.
    return reducer.sender.concurrent and not reducer.may_be_unused


def layers_with_groups(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers that have a process group of their own."""
    return [layer for layer in module.modules() if hasattr(layer, "process_group")]


def communicate(reducer: CoreReducer) -> bool:
    """True if layers of the Reducer's module communicate in its group."""
    found = reducer.extension(CommunicatingLayers)
    return found is not None and found.communicate()


def look_for_layers(reducer: CoreReducer) -> None:
    """Adds the extension if the module has such layers; an earlier one is replaced."""
    if (found := reducer.extension(CommunicatingLayers)) is not None:
        reducer.remove_extension(found)
    if layers_with_groups(reducer.module):
        reducer.add_extension(CommunicatingLayers())
