"""Parameters that a forward pass writes to, which nothing keeps equal over ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

# A layer with `max_norm` rescales, in forward, the rows that this rank has looked up.
_RESCALING = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class ForwardWrites:
    """Compares parameters' version counters before and after a forward pass that trains.

    Writes to `parameter.data` are not counted by torch, and so not noticed here.

    Args:
        parameters: all that ranks hold alike, those that are frozen, too, by name.

    Attributes:
        names: of those that have been written to so far.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._before: list[int] | None = None
        self.names: list[str] = []

    def on_enter(self, trains: bool) -> None:
        """A forward pass begins; only one that trains counts.

        An earlier one that an exception ended is forgotten.
        """
        self._before = [p._version for p in self._parameters.values()] if trains else None

    def on_exit(self) -> list[str]:
        """It has ended; returns the names of the parameters that it has written to.

        Idempotent: nothing where none has begun.
        """
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
        """Whether some rank's forward pass has written to parameters. Collective."""
        device = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
        mine = torch.tensor([len(self.names)], device=device)
        written = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(written, mine, group=process_group)
        return bool(torch.cat(written).any())


def check_rescaling(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises if a layer is known to rescale one of these parameters in forward.

    Raises:
        ValueError: it is an embedding with `max_norm`.
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
