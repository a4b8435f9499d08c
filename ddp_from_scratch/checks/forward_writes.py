"""Detects parameters that a forward pass writes to: nothing keeps these equal over ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ddp_from_scratch.sync.check_sync import gather_integers

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
        self._before = [p._version for p in self._parameters.values()] if trains else None

    def on_exit(self) -> list[str]:
        """Ends the forward pass; returns the names of parameters it has written to. Idempotent."""
        before, self._before = self._before, None
        if before is None:
            return []
        now = [parameter._version for parameter in self._parameters.values()]
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
